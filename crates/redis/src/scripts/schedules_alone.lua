-- Fast path for one key with several schedules that do not count denied requests, and whose units
-- are whole numbers of microseconds.
--
-- KEYS[1]  the key
-- ARGV     the header of its value; its format; for each schedule the duration of the cost, and
--          how far the arrival time may be ahead; [the instant]
--
-- Returns the instant in 7 bytes and the value before. Returns {value, instant}, and charges
-- nothing, if the value has another header: the key is blocked, has a ledger, or is stored under
-- other parameters.
local key, head, format, schedules, now = KEYS[1], ARGV[1], ARGV[2], math.floor((#ARGV - 2) / 2), nil
-- The number of arguments before those of the first schedule.
local FIRST = 2
local slack = 2
if #ARGV > FIRST + 2 * schedules then
  now, slack = tonumber(ARGV[#ARGV]), 86400000
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local value = redis.call('GET', key)
local arrivals
if value then
  if #value ~= #head + 7 * schedules or string.sub(value, 1, #head) ~= head then
    return {value, now}
  end
  arrivals = {struct.unpack(format, value, #head + 1)}
else
  -- Sized for the usual number of schedules, because a table that grows costs more than one of
  -- sufficient size.
  arrivals = {now, now, now, now}
end
local longest, denied = 0, false
for schedule = 1, schedules do
  local ahead = (arrivals[schedule] or now) - now
  if ahead < 0 then
    ahead = 0
  end
  local at = FIRST + 2 * schedule
  ahead = ahead + ARGV[at - 1]
  denied = denied or ahead - ARGV[at] > 0
  arrivals[schedule] = now + ahead
  if ahead > longest then
    longest = ahead
  end
end
if not denied then
  local states = struct.pack(format, unpack(arrivals, 1, schedules))
  redis.call('PSETEX', key, math.floor(longest / 1000) + slack, head .. states)
end
return struct.pack('>I7', now) .. (value or '')
