-- A common decision, cut short: one key, several hard schedules whose units are whole numbers of microseconds.
--
-- KEYS[1] the key
-- ARGV    the head of its value; its format; for each schedule how long the cost lasts, and how far the arrival time may
--         lie ahead; [the instant]
--
-- Answers the instant in 7 bytes, and the value as it was; or {value, instant} where that has another head, because the key
-- is blocked or was left under other numbers, and nothing was charged.
local key, head, format, count, now = KEYS[1], ARGV[1], ARGV[2], #ARGV, nil
local slack = 2
if count % 2 == 1 then
  now, slack, count = tonumber(ARGV[count]), 86400000, count - 1
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local value = redis.call('GET', key)
local state
if value then
  if #value ~= 4 * count - 3 or string.sub(value, 1, 4) ~= head then
    return {value, now}
  end
  state = {struct.unpack(format, value)}
else
  -- As long as most: a table that grows costs more than one that is long from the beginning.
  state = {head, count / 2 - 1, 0, now, 0, now, 0, now, 0, now}
end
local longest, denied = 0, false
for at = 4, count, 2 do
  local after = (state[at] or now) - now
  if after < 0 then
    after = 0
  end
  after = after + ARGV[at - 1]
  denied = denied or after - ARGV[at] > 0
  state[at - 1], state[at] = 0, now + after
  if after > longest then
    longest = after
  end
end
if not denied then
  redis.call('PSETEX', key, math.floor(longest / 1000) + slack, struct.pack(format, unpack(state, 1, count)))
end
return struct.pack('>I7', now) .. (value or '')
