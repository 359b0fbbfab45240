local missing_N, next_refill_N = 0, now + every_N
if full_at_N > now then
  if full_at_N - now > JUMP then
    -- (lead.lua)
    if is_from_ahead(full_at_N - now, stored_lead_N) then
      return {raw, now}
    end
  end
  -- The number of refills before the last refill. The last refill counts for at most `refill_N`.
  -- The operator `%` is exact for these numbers, because none of them is near 2^53.
  local whole = full_at_N - now - 1
  local refills = (whole - whole % every_N) / every_N
  missing_N = refills * refill_N + (last_N < refill_N and last_N or refill_N)
  next_refill_N = full_at_N - refills * every_N
end
missing_N = missing_N + cost_N
if missing_N > capacity_N then
  denies = true
else
  local refills = (missing_N - 1 - (missing_N - 1) % refill_N) / refill_N
  full_at_N = next_refill_N + refills * every_N
  last_N = missing_N - refills * refill_N
  if full_at_N > expires then
    expires = full_at_N
  end
end
