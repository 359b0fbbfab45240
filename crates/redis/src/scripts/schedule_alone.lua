-- Fast path for one key with one schedule that does not count denied requests, and whose unit is a
-- whole number of microseconds.
--
-- KEYS[1]  the key
-- ARGV     the header of its value; the duration of the cost; how far the arrival time may be
--          ahead; the lead for that; [the instant]
--
-- Returns how far the arrival time was ahead before. Returns {value, instant}, and charges nothing,
-- if the value has another header (the key is blocked, has a ledger, or is stored under other
-- parameters), or if a clock that was ahead has written it.
local key, head, now = KEYS[1], ARGV[1], ARGV[5] and tonumber(ARGV[5])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local ahead, slack = 0, ARGV[5] and 86400000 or 2
local lead
local value = redis.call('GET', key)
if value then
  if #value ~= 12 then
    return {value, now}
  end
  local found, arrival
  found, arrival, lead = struct.unpack('>c4I7I1', value)
  if found ~= head then
    return {value, now}
  end
  ahead = arrival - now
  if ahead < 0 then
    ahead = 0
  end
end
local after = ahead + ARGV[2]
if after - ARGV[3] <= 0 then
  local millis = math.floor(after / 1000) + slack
  redis.call('PSETEX', key, millis, struct.pack('>c4I7c1', head, now + after, ARGV[4]))
elseif ahead - ARGV[3] > 0 then
  -- (lead.lua)
  if is_from_ahead(ahead, lead) then
    return {value, now}
  end
end
return ahead
