-- Fast path for one key whose limits all share one sliding window log and do not count denied
-- requests. For a long log, the script reads and writes only a few positions.
--
-- KEYS[1]  the key
-- ARGV     the header of its value; the cost; for each window its limit and span; [the instant]
--
-- Returns the instant in 7 bytes, followed by the value before the charge. The returned value can
-- have merged entries where the merge does not change the decision. Charges nothing and returns
-- {value, instant} if the value has another header (because the key is blocked, or was stored under
-- other parameters), or if a clock that was ahead wrote the value. The state has the format of
-- `log.lua`. However, entries that no window needs, and an expired ledger, may remain at the front
-- for some time.
local call, struct_pack, struct_unpack, sub = redis.call, struct.pack, struct.unpack, string.sub
local key, head, cost = KEYS[1], ARGV[1], tonumber(ARGV[2])
local windows = math.floor((#ARGV - 2) / 2)
local now, slack = ARGV[3 + 2 * windows] and tonumber(ARGV[3 + 2 * windows]), 86400000
if not now then
  local time = call('TIME')
  now, slack = time[1] * 1000000 + time[2], 2
end
-- A value of at least LONG bytes is changed in place, and Redis allocates spare capacity for it. A
-- shorter value is replaced as a whole.
local LONG, ENTRY_BYTES, WINDOW_BYTES, TURN, MOST = 2048, 10, 14, 2 ^ 24, 2047

-- (lead.lua)

-- The part before the entries: the header, which may contain a ledger; 15 bytes; and the position
-- of each window.
local value, front, ledger_until = call('GETRANGE', key, 0, LONG - 1), head, 0
if value ~= '' and sub(value, 1, #head) ~= head then
  -- (ledger.lua)
  local state
  state, front, ledger_until = open_ledger(value, head)
  if not state then
    return {call('GET', key), now}
  end
end
local windows_at = #front + 15
local begin = windows_at + WINDOW_BYTES * windows
local count, base, total, last_at, window_states, longest = 0, 0, 0, 0, {}, 0
local is_long = #value == LONG
local function entry(number)
  if is_long then
    local at = begin + ENTRY_BYTES * number
    return struct_unpack('>I7I3', call('GETRANGE', key, at, at + ENTRY_BYTES - 1))
  end
  return struct_unpack('>I7I3', value, begin + 1 + ENTRY_BYTES * number)
end
if value ~= '' then
  local _
  _, count, _, base = struct_unpack('>I7I4I1I3', value, #front + 1)
  total = base
  if count > 0 then
    last_at, total = entry(count - 1)
    if last_at > now + JUMP then
      return {call('GET', key), now}
    end
  end
end

-- Returns the first entry after `low` for which `beyond` is true, and the entry before it. `beyond`
-- must be false for `low` itself. If `beyond` is false for all entries, returns `count` as the
-- first result.
local function search(low, beyond)
  local step = 1
  while low + step < count and not beyond(low + step) do
    low, step = low + step, step * 2
  end
  local high = math.min(low + step, count)
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if beyond(middle) then
      high = middle
    else
      low = middle
    end
  end
  return high, low
end

local denied, fewest, fewest_base, points = false, count, total, {}
for w = 1, windows do
  local limit, span = tonumber(ARGV[1 + 2 * w]), tonumber(ARGV[2 + 2 * w])
  local first, before, at = 0, base, 0
  if value ~= '' then
    first, before, at = struct_unpack('>I4I3I7', value, windows_at + WINDOW_BYTES * (w - 1) + 1)
  end
  if first < count and at + span <= now then
    local last_expired
    first, last_expired = search(first, function(number)
      return entry(number) + span > now
    end)
    before = select(2, entry(last_expired))
    at = first < count and entry(first) or 0
  end
  local sum = count > 0 and (total - before) % TURN or 0
  if cost > limit or sum > limit - cost then
    denied = true
    if cost <= limit then
      -- Find the last entry that must expire from the window before the cost fits.
      local frees = search(first - 1, function(number)
        local _, upto = entry(number)
        return (upto - before) % TURN >= sum - (limit - cost)
      end)
      local charged_at, sum_with = entry(frees)
      points[#points + 1] = {number = frees, at = charged_at, sum = sum_with}
    end
  end
  if first > 0 then
    points[#points + 1] = {number = first - 1, at = now - span, sum = before}
  end
  if first < fewest then
    fewest, fewest_base = first, before
  end
  window_states[w] = {first = first, before = before, begins = at}
  longest = math.max(longest, span)
end

local value_before = ''
if count > fewest then
  points[#points + 1] = {number = count - 1, at = last_at, sum = total}
  table.sort(points, function(a, b)
    return a.number < b.number or a.number == b.number and a.at < b.at
  end)
  local entries, passed = {}, fewest - 1
  for i = 1, #points do
    local point = points[i]
    if point.number > passed then
      entries[#entries + 1] = struct_pack('>I7I3', point.at, point.sum)
      passed = point.number
    end
  end
  local state = struct_pack('>I7I4I1I3', longest, #entries, 0, fewest_base)
  value_before = head .. state .. table.concat(entries)
end
if denied then
  return struct_pack('>I7', now) .. value_before
end

local at, added, stay = math.max(now, last_at), {}, count
if last_at == at and count > fewest then
  local before_last = count > 1 and select(2, entry(count - 2)) or base
  if (total - before_last) % TURN + cost <= MOST then
    -- The charge is added to the last entry.
    stay, total = count - 1, total + cost
    cost, added[1] = 0, struct_pack('>I7I3', at, total % TURN)
  end
end
for w = 1, windows do
  if window_states[w].first == count then
    window_states[w] = {first = count, before = total % TURN, begins = at}
  end
end
while cost > 0 do
  local part = math.min(cost, MOST)
  total, cost = total + part, cost - part
  added[#added + 1] = struct_pack('>I7I3', at, total % TURN)
end

-- A long log drops entries that no window needs only when they make up more than half of the log,
-- so that the log is rarely copied.
local dropped = (not is_long or fewest > stay / 2) and fewest or 0
if dropped > 0 then
  base = fewest_base
end
local in_place = is_long and dropped == 0
if ledger_until <= now and not in_place then
  front = head
end
local header = {front, struct_pack('>I7I4I1I3', longest, stay + #added - dropped, windows, base)}
for w = 1, windows do
  local window = window_states[w]
  header[2 + w] = struct_pack('>I4I3I7', window.first - dropped, window.before, window.begins)
end
header, added = table.concat(header), table.concat(added)
local millis = math.floor((math.max(at + longest, ledger_until) - now) / 1000) + slack
local from, upto = begin + ENTRY_BYTES * dropped, begin + ENTRY_BYTES * stay
if in_place then
  call('SETRANGE', key, 0, header)
  call('SETRANGE', key, upto, added)
  call('PEXPIRE', key, millis)
else
  local entries = is_long and upto > from and call('GETRANGE', key, from, upto - 1)
    or sub(value, from + 1, upto)
  call('PSETEX', key, millis, header .. entries .. added)
end
return struct_pack('>I7', now) .. value_before
