-- Minimal GCRA, exact to the microsecond. The key's value is the theoretical arrival time, encoded
-- in 7 bytes. ARGV contains the emission interval and the tolerance in microseconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local arrival = redis.call('GET', KEYS[1])
arrival = arrival and struct.unpack('>I7', arrival) or now
local ahead = (arrival > now and arrival - now or 0) + ARGV[1]
if ahead - ARGV[2] > 0 then
  return -ahead
end
redis.call('PSETEX', KEYS[1], math.floor(ahead / 1000) + 2, struct.pack('>I7', now + ahead))
return ahead
