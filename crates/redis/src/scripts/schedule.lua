-- Schedule: {…, parts of a microsecond, fits, lasting, its parts, tau, its parts, format, whether it is a queue, and then perhaps how
-- long a request may wait in it}
-- A state is the arrival time and, where a microsecond has parts, those.
kernels[0] = function(member, value, position, mode)
  local _, _, _, fraction, fits, lasting, lasting_parts, tau, tau_parts, format, _, longest = each(member)
  local ahead, rest = 0, 0
  if position then
    local arrival
    if fraction == 1 then
      arrival, position = unpack('>I7', value, position)
    else
      arrival, rest, position = unpack(format, value, position)
    end
    ahead = arrival - now
    if ahead < 0 then
      ahead, rest = 0, 0
    end
  end
  local late = longest and (ahead > longest or ahead == longest and rest > 0)
  local owed, owed_parts = ahead, rest
  if mode ~= KEEP then
    ahead, rest = ahead + lasting, rest + lasting_parts
    if rest >= fraction then
      ahead, rest = ahead + 1, rest - fraction
    end
  end
  local over = ahead > tau or ahead == tau and rest > tau_parts
  if over and mode == CLAMP then
    ahead, rest = tau, tau_parts
    -- Beyond the brim already, by wider numbers.
    if owed > tau or owed == tau and owed_parts > tau_parts then
      ahead, rest = owed, owed_parts
    end
  end
  local expires = now + ahead
  if fraction == 1 then
    return position, over or late or not fits, pack('>I7', expires), expires
  end
  return position, over or late or not fits, pack(format, expires, rest), expires + (rest > 0 and 1 or 0)
end
