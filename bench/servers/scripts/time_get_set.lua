-- The same as time_get_psetex.lua, but with the theoretical arrival time as a decimal number.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local arrival = tonumber(redis.call('GET', KEYS[1])) or now
local ahead = (arrival > now and arrival - now or 0) + ARGV[1]
if ahead - ARGV[2] > 0 then
  return -ahead
end
redis.call('SET', KEYS[1], string.format('%.0f', now + ahead), 'PX', math.floor(ahead / 1000) + 2)
return ahead
