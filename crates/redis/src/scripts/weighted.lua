-- Weighted: {…, limit, window, cost, fits}
--
-- A state is the number of a window, the units spent in the previous window and in this one, and
-- the length of a window.

-- Returns whether a * b > c * d, for factors below 2^50. A product may exceed the 2^53 up to which
-- Lua's numbers are exact.
local function exceeds(a, b, c, d)
  local left, right = a * b, c * d
  if left < 2 ^ 53 and right < 2 ^ 53 then
    return left > right
  end
  local function wide(x, y)
    local x_low, y_low = fmod(x, 2 ^ 26), fmod(y, 2 ^ 26)
    local x_high, y_high = (x - x_low) / 2 ^ 26, (y - y_low) / 2 ^ 26
    local middle = x_high * y_low + x_low * y_high
    local middle_low = fmod(middle, 2 ^ 26)
    local low = middle_low * 2 ^ 26 + x_low * y_low
    local carry = floor(low / 2 ^ 52)
    return x_high * y_high + (middle - middle_low) / 2 ^ 26 + carry, low - carry * 2 ^ 52
  end
  local left_high, left_low = wide(a, b)
  local right_high, right_low = wide(c, d)
  return left_high > right_high or left_high == right_high and left_low > right_low
end

ask[5] = function(member, value, position)
  local _, _, limit, window, cost, fits = spread(member)
  local index, previous, current, _ = 0, 0, 0, nil
  if position then
    index, previous, current, _, position = struct_unpack('>I7I7I7I7', value, position)
  end
  local at = (now - fmod(now, window)) / window
  if index * window > now + JUMP then
    from_ahead = true
  elseif at > index then
    index, previous, current = at, at == index + 1 and current or 0, 0
  end
  local left = min((index + 1) * window - now, window)
  local free = limit - current - cost
  local over = not fits or free < 0 or exceeds(previous, left, free, window)
  return position, over, index, previous, current
end

charge[5] = function(member, found, mode)
  local _, _, limit, window, cost = spread(member)
  local _, _, index, previous, current = spread(found, 1, MOST_FOUND)
  if mode ~= KEEP then
    current = min(current + cost, max(limit, current))
  end
  local expires = 0
  if current > 0 then
    expires = (index + 2) * window
  elseif previous > 0 then
    expires = (index + 1) * window
  end
  return struct_pack('>I7I7I7I7', index, previous, current, window), expires
end
