-- No clock is read: what is left of the key's life is how far the arrival time lies ahead, in whole milliseconds, and its
-- value the microseconds over. Time passes in milliseconds, so that who comes back when it was told to may be too early.
local left = redis.call('PTTL', KEYS[1])
local ahead = tonumber(ARGV[1])
if left > 0 then
  ahead = ahead + (left - 1) * 1000 + redis.call('GET', KEYS[1])
end
if ahead - ARGV[2] > 0 then
  return -ahead
end
local over = ahead % 1000
redis.call('PSETEX', KEYS[1], (ahead - over) / 1000 + 1, over)
return ahead
