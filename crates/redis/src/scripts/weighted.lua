-- Weighted window. A state consists of the index of the current window, the units charged in the
-- previous window, the units charged in the current window, and the window length.
if kernel == WEIGHTED then
  local limit, window, cost
  limit, window, cost, at = struct_unpack(WEIGHTED_NUMBERS, program, at)
  local index, previous, current, _ = 0, 0, 0, nil
  if position then
    index, previous, current, _, position = struct_unpack('>I7I7I7I7', value, position)
  end
  local into = fmod(now, window)
  local newest = (now - into) / window
  if newest > index then
    index, previous, current = newest, newest == index + 1 and current or 0, 0
  elseif newest < index then
    from_ahead = from_ahead or index * window > now + JUMP
    into = 0
  end
  local left, free = window - into, limit - current - cost
  local denies = free < 0
  if previous > 0 and not denies then
    -- (weight.lua)
    denies = exceeds
  end
  if mode == PEEK or mode == CHARGE and denies then
    return at, position, denies
  end
  if mode ~= KEEP then
    current = min(current + cost, max(limit, current))
  end
  local expires = 0
  if current > 0 then
    expires = (index + 2) * window
  elseif previous > 0 then
    expires = (index + 1) * window
  end
  return at, position, denies, struct_pack('>I7I7I7I7', index, previous, current, window), expires
end
