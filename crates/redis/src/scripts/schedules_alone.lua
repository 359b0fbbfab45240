-- Fast path for one key with several schedules that do not count denied requests, and whose units
-- are whole numbers of microseconds.
--
-- KEYS[1]  the key
-- ARGV     the header of its value; its format; for each schedule the duration of the cost, how far
--          the arrival time may be ahead, and the lead for that; [the instant]
--
-- Returns the instant in 7 bytes and the value before. Returns {value, instant}, and charges
-- nothing, if the value has another header (the key is blocked, has a ledger, or is stored under
-- other parameters), or if a clock that was ahead has written it.
local key, head, format, schedules, now = KEYS[1], ARGV[1], ARGV[2], math.floor((#ARGV - 2) / 3), nil
-- The number of arguments before those of the first schedule.
local FIRST = 2
local slack = 2
if #ARGV > FIRST + 3 * schedules then
  now, slack = tonumber(ARGV[#ARGV]), 86400000
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local value = redis.call('GET', key)
-- The arrival time and the lead of each schedule.
local states
if value then
  if #value ~= #head + 8 * schedules or string.sub(value, 1, #head) ~= head then
    return {value, now}
  end
  states = {struct.unpack(format, value, #head + 1)}
else
  -- Sized for the usual number of schedules, because a table that grows costs more than one of
  -- sufficient size.
  states = {now, '', now, '', now, '', now, ''}
end
local longest, denied = 0, false
for schedule = 1, schedules do
  local at, own = FIRST + 3 * schedule - 1, 2 * schedule
  local ahead = (states[own - 1] or now) - now
  if ahead < 0 then
    ahead = 0
  elseif ahead - ARGV[at] > 0 then
    -- (lead.lua)
    if is_from_ahead(ahead, string.byte(states[own])) then
      return {value, now}
    end
  end
  ahead = ahead + ARGV[at - 1]
  denied = denied or ahead - ARGV[at] > 0
  states[own - 1], states[own] = now + ahead, ARGV[at + 1]
  if ahead > longest then
    longest = ahead
  end
end
if not denied then
  local written = struct.pack(format, unpack(states, 1, 2 * schedules))
  redis.call('PSETEX', key, math.floor(longest / 1000) + slack, head .. written)
end
return struct.pack('>I7', now) .. (value or '')
