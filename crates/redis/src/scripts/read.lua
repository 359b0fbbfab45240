-- Reads values unchanged.
--
-- KEYS     the keys
-- ARGV[1]  the instant; empty for the server's own clock
--
-- Returns the instant and each value.
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local reply = {now}
for i = 1, #KEYS do
  reply[1 + i] = redis.call('GET', KEYS[i]) or ''
end
return reply
