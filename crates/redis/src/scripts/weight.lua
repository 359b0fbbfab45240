-- Computes whether the weighted count of the previous window, previous * left / window, exceeds
-- `free`. Lua numbers are exact only up to 2^53, so larger products are computed in two parts.
local weight, room, exceeds = previous * left, free * window, nil
if weight < 2 ^ 53 and room < 2 ^ 53 then
  exceeds = weight > room
else
  local fmod, floor = math.fmod, math.floor
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
  exceeds = weight_high > room_high or weight_high == room_high and weight_low > room_low
end
