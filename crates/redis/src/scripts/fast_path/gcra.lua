local ahead_N = arrival_N - now
if ahead_N < 0 then
  ahead_N = 0
elseif ahead_N > tau_N then
  -- (lead.lua)
  if is_from_ahead(ahead_N, stored_lead_N) then
    return {raw, now}
  end
end
ahead_N = ahead_N + duration_N
denies = denies or ahead_N > tau_N
arrival_N = now + ahead_N
if arrival_N > expires then
  expires = arrival_N
end
