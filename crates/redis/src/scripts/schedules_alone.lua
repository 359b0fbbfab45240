-- Fast path for one key with several schedules that do not count denied requests, and whose units
-- are whole numbers of microseconds.
--
-- KEYS[1]  the key
-- ARGV[1]  the header of its value
-- ARGV[2]  for each schedule the duration of the cost, how far the arrival time may be ahead, and
--          the lead for that
-- ARGV[3]  the instant; absent for the server's own clock
--
-- Returns the instant in 7 bytes and the value before. Returns {value, instant}, and charges
-- nothing, if the value has another header (the key is blocked, or is stored under other
-- parameters), or if a clock that was ahead has written it. A ledger stays in the value for as long
-- as it is kept.
local call, struct_pack, struct_unpack = redis.call, struct.pack, struct.unpack
local key, head, numbers, now, slack = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), 86400000
if not now then
  local time = call('TIME')
  now, slack = time[1] * 1000000 + time[2], 2
end
local NUMBERS_BYTES, STATE_BYTES = 15, 8
local schedules = #numbers / NUMBERS_BYTES
local raw, bytes, kept = call('GET', key), #head + STATE_BYTES * schedules, 0
local value, front = raw, head
if value and (#value ~= bytes or string.sub(value, 1, #head) ~= head) then
  -- (ledger.lua)
  value, front, kept = open_ledger(raw, head)
  if not value or #value ~= bytes then
    return {raw, now}
  end
  if kept <= now then
    front, kept = head, 0
  end
end
-- Sized for the usual number of schedules, because a table that grows costs more than one of
-- sufficient size.
local states = {'', '', '', ''}
local at, position, longest, denies = 1, #head + 1, 0, false
for schedule = 1, schedules do
  local duration, tau, lead
  duration, tau, lead, at = struct_unpack('>I7I7I1', numbers, at)
  local ahead = 0
  if value then
    local arrival, found_lead
    arrival, found_lead, position = struct_unpack('>I7I1', value, position)
    ahead = arrival - now
    if ahead < 0 then
      ahead = 0
    elseif ahead > tau then
      -- (lead.lua)
      if is_from_ahead(ahead, found_lead) then
        return {raw, now}
      end
    end
  end
  ahead = ahead + duration
  denies = denies or ahead > tau
  states[schedule] = struct_pack('>I7I1', now + ahead, lead)
  if ahead > longest then
    longest = ahead
  end
end
if not denies then
  if longest < kept - now then
    longest = kept - now
  end
  call('PSETEX', key, math.floor(longest / 1000) + slack, front .. table.concat(states))
end
return struct_pack('>I7', now) .. (value or '')
