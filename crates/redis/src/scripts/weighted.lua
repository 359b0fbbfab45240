-- Weighted. A state is the number of a window, the units spent in the previous window and in this
-- one, and the length of a window.
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
    local weight, room = previous * left, free * window
    if weight < 2 ^ 53 and room < 2 ^ 53 then
      denies = weight > room
    else
      -- Lua's numbers are exact only up to 2^53, so the products are computed in two parts.
      local function wide(x, y)
        local x_low, y_low = fmod(x, 2 ^ 26), fmod(y, 2 ^ 26)
        local x_high, y_high = (x - x_low) / 2 ^ 26, (y - y_low) / 2 ^ 26
        local middle = x_high * y_low + x_low * y_high
        local middle_low = fmod(middle, 2 ^ 26)
        local low = middle_low * 2 ^ 26 + x_low * y_low
        local carry = floor(low / 2 ^ 52)
        return x_high * y_high + (middle - middle_low) / 2 ^ 26 + carry, low - carry * 2 ^ 52
      end
      local weight_high, weight_low = wide(previous, left)
      local room_high, room_low = wide(free, window)
      denies = weight_high > room_high or weight_high == room_high and weight_low > room_low
    end
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
