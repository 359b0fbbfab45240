-- GCRA without reading the clock. The time until the theoretical arrival time is stored in two
-- parts: whole milliseconds as the key's TTL, and the remaining microseconds as the key's value.
-- The TTL has a resolution of 1 ms, so a client that waits exactly for the retry time may still be
-- denied.
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
