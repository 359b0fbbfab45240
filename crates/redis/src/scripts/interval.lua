-- Interval token bucket. A state consists of the instant at which the bucket is full again, the
-- size of the last refill before that instant, and the lead (lead.lua). The operator `%` is exact
-- for these numbers, because none of them is near 2^53.
if kernel == INTERVAL then
  local refill, every, capacity, cost
  refill, every, capacity, cost, at = struct_unpack(INTERVAL_NUMBERS, program, at)
  local full_at, last, missing, next_refill = 0, 0, 0, now + every
  if position then
    local lead
    full_at, last, lead, position = struct_unpack('>I7I7I1', value, position)
    if full_at > now then
      from_ahead = from_ahead or is_from_ahead(full_at - now, lead)
      -- The number of refills before the last refill. The last refill counts for at most `refill`.
      local whole = full_at - now - 1
      local refills = (whole - whole % every) / every
      missing = refills * refill + (last < refill and last or refill)
      next_refill = full_at - refills * every
    end
  end
  local denies = missing > capacity - cost
  if mode == PEEK or mode == CHARGE and denies then
    return at, position, denies
  end
  -- If the state exceeds the capacity because it was charged under a higher limit, it is kept
  -- unchanged.
  if mode ~= KEEP and missing < capacity then
    missing = min(missing + cost, capacity)
    local refills = (missing - 1 - (missing - 1) % refill) / refill
    full_at = next_refill + refills * every
    last = missing - refills * refill
  end
  local state = struct_pack('>I7I7I1', full_at, last, lead_of(full_at > now and full_at - now or 0))
  return at, position, denies, state, full_at
end
