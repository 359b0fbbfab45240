-- Weighted: {…, limit, window, cost, fits}
-- A state is the number of a window, what was spent in the one before and in this one, and how long a window is.

-- Whether a * b > c * d, for factors below 2^50.
local function exceeds(a, b, c, d)
  local left, right = a * b, c * d
  if left < 2 ^ 53 and right < 2 ^ 53 then
    return left > right
  end
  local function wide(x, y)
    local x_low, y_low = math.fmod(x, 2 ^ 26), math.fmod(y, 2 ^ 26)
    local x_high, y_high = (x - x_low) / 2 ^ 26, (y - y_low) / 2 ^ 26
    local middle = x_high * y_low + x_low * y_high
    local middle_low = math.fmod(middle, 2 ^ 26)
    local low = middle_low * 2 ^ 26 + x_low * y_low
    local carry = math.floor(low / 2 ^ 52)
    return x_high * y_high + (middle - middle_low) / 2 ^ 26 + carry, low - carry * 2 ^ 52
  end
  local left_high, left_low = wide(a, b)
  local right_high, right_low = wide(c, d)
  return left_high > right_high or left_high == right_high and left_low > right_low
end

kernels[5] = function(member, value, position, mode)
  local _, _, _, limit, window, cost, fits = each(member)
  local index, previous, current, _ = 0, 0, 0, nil
  if position then
    index, previous, current, _, position = unpack('>I7I7I7I7', value, position)
  end
  local at = (now - math.fmod(now, window)) / window
  if at > index then
    index, previous, current = at, at == index + 1 and current or 0, 0
  end
  local left = math.min((index + 1) * window - now, window)
  local free = limit - current - cost
  local over = not fits or free < 0 or exceeds(previous, left, free, window)
  if mode ~= KEEP then
    current = math.min(current + cost, math.max(limit, current))
  end
  local expires = 0
  if current > 0 then
    expires = (index + 2) * window
  elseif previous > 0 then
    expires = (index + 1) * window
  end
  return position, over, pack('>I7I7I7I7', index, previous, current, window), expires
end
