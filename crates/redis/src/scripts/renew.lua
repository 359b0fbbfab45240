-- Renews the places that `check` has reserved: who holds one holds it from now on, as if it had just been taken. One that is not there
-- any more is taken again if it is free, and else lost.
--
-- KEYS     the key of each charge
-- ARGV[1]  the instant; empty for the server's own
-- ARGV[2]  how many milliseconds a key outlives its state
-- ARGV[3…] of each charge three: its program, as it was charged; its receipt; and the value of a key that has spent nothing
--
-- Answers of each charge {1 all are held, 0 one is lost; the receipt from now on}. `give_back.lua` says what is in one.
local call, pack, unpack, sub = redis.call, struct.pack, struct.unpack, string.sub
local byte, fmod = string.byte, math.fmod
local now, slack = tonumber(ARGV[1]), tonumber(ARGV[2])
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local LEASE, ENTRY, TURN, MOST = 6, 10, 2 ^ 24, 2047

-- How long the state of a kernel at `start` of `value` is; the fraction of a schedule has so many bytes.
local function length(kernel, value, start, fraction)
  if kernel == 0 then
    return 7 + fraction
  elseif kernel == 3 or kernel == LEASE then
    local _, count, windows = unpack('>I7I4I1', value, start)
    return 15 + 14 * windows + ENTRY * count
  elseif kernel == 4 then
    return 23 + 7 * select(4, unpack('>I7I7I7I2', value, start))
  end
  return kernel == 5 and 28 or 14
end

-- When the state of a kernel from `start` of `value` to `behind` has expired.
local function expiry(kernel, value, start, behind)
  if kernel == 0 then
    -- A schedule's fraction of a microsecond is not over before the next.
    return unpack('>I7', value, start) + (string.find(sub(value, start + 7, behind - 1), '[^%z]') and 1 or 0)
  elseif kernel == 3 or kernel == LEASE then
    local longest, count = unpack('>I7I4', value, start)
    return count > 0 and unpack('>I7', value, behind - ENTRY) + longest or 0
  elseif kernel == 4 then
    local newest, width, total, summed = unpack('>I7I7I7I2', value, start)
    -- Nothing was counted in the newest perhaps.
    local last = behind - 7
    while total > 0 and unpack('>I7', value, last) == 0 do
      newest, last = newest - 1, last - 7
    end
    return total > 0 and (newest + summed) * width or 0
  elseif kernel == 5 then
    local index, previous, current, window = unpack('>I7I7I7I7', value, start)
    return (current > 0 and index + 2 or previous > 0 and index + 1 or 0) * window
  end
  return unpack('>I7', value, kernel == 2 and start + 7 or start)
end

-- Where the states of a program's members begin in `value`, what precedes each included, and where the last one ends; and when all have
-- expired. Nothing where other kernels left them.
local function places_of(program, value)
  local places, expires = {5 + #program[2]}, 0
  for j = 5, #program do
    local member, begin = program[j], places[j - 4]
    local kind = #member[3] > 0 and byte(value, begin) or member[1]
    if fmod(kind, 8) ~= member[1] then
      return
    end
    local start = begin + #member[3]
    local behind = start + length(member[1], value, start, (kind - member[1]) / 8)
    places[j - 3], expires = behind, math.max(expires, expiry(member[1], value, start, behind))
  end
  return places, expires
end

-- The log at `start` of `value`, for who has held `units` in it `since` then, at most `limit` being held at once: the log
-- thereafter, when the last lease is over, and since when they are held; nothing where they are lost.
local function renewed(value, start, since, units, limit)
  local longest, count, windows, base, after = unpack('>I7I4I1I3', value, start)
  local first = after + 14 * windows
  local function entry(number)
    return unpack('>I7I3', value, first + ENTRY * number)
  end
  local function sum_before(number)
    return number > 0 and select(2, entry(number - 1)) or base
  end
  -- How many entries are no later than that.
  local function until_then(instant)
    local low, high = 0, count
    while low < high do
      local middle = math.floor((low + high) / 2)
      if entry(middle) <= instant then
        low = middle + 1
      else
        high = middle
      end
    end
    return low
  end
  local oldest, total = until_then(now - longest), sum_before(count)
  local behind = math.max(until_then(since), oldest)
  -- What is taken out is added to all that was before it, so that nothing that came after it has to be written anew.
  local kept, taken = {}, 0
  for number = behind - 1, oldest, -1 do
    local at, sum = entry(number)
    local own = (sum - sum_before(number)) % TURN
    local gone = at == since and math.min(own, units - taken) or 0
    kept[number - oldest + 1] = gone < own and pack('>I7I3', at, (sum + taken) % TURN) or ''
    taken = taken + gone
  end
  local others = (total - sum_before(oldest)) % TURN - taken
  if taken < units and (units > limit or others > limit - units) then
    return
  end
  base = (sum_before(oldest) + taken) % TURN
  local at = math.max(now, count > 0 and entry(count - 1) or 0)
  local entries = table.concat(kept) .. sub(value, first + ENTRY * behind, first + ENTRY * count - 1)
  while units > 0 do
    total, units = (total + math.min(units, MOST)) % TURN, units - math.min(units, MOST)
    entries = entries .. pack('>I7I3', at, total)
  end
  local place = pack('>I4I3I7', 0, base, (unpack('>I7', entries)))
  return pack('>I7I4I1I3', longest, #entries / ENTRY, 1, base) .. place .. entries, at + longest, at
end

-- The states of `value` at those places, renewed; the end of the last lease; and whether one is lost.
local function states_of(program, value, places, receipt)
  local states, expires, lost = {}, 0, false
  for j = 5, #program do
    local member, number = program[j], j - 4
    local begin, behind = places[number], places[number + 1]
    states[number] = sub(value, begin, behind - 1)
    if member[1] == LEASE then
      local start, since = begin + #member[3], unpack('>I7', receipt[2 + number])
      local log, till, at = renewed(value, start, since, member[5], member[6])
      if log then
        states[number] = sub(value, begin, start - 1) .. log
        expires, receipt[2 + number] = math.max(expires, till), pack('>I7', at)
      else
        lost = true
      end
    end
  end
  return table.concat(states), expires, lost
end

local answers = {}
for i = 1, #KEYS do
  local program, receipt, block = cmsgpack.unpack(ARGV[3 * i]), cmsgpack.unpack(ARGV[3 * i + 1]), ''
  local value = call('GET', KEYS[i]) or ''
  local first = byte(value)
  if first and first >= 128 then
    block, value = sub(value, 5, 11), string.char(first - 128) .. sub(value, 2, 4) .. sub(value, 12)
  end
  -- The head names the kernel, whatever the numbers.
  local own, fresh, places, gone = program[1], ARGV[3 * i + 2], nil, nil
  local is_alike = #value > 4 and byte(value) - fmod(byte(value), 16) == byte(own) - fmod(byte(own), 16)
  if is_alike and sub(value, 5, 4 + #program[2]) == program[2] then
    places, gone = places_of(program, value)
  end
  if #value <= 4 or places and gone <= now then
    value, places = fresh, places_of(program, fresh)
  end
  local states, expires, lost = nil, 0, true
  if places then
    states, expires, lost = states_of(program, value, places, receipt)
  end
  if expires > 0 then
    local head = sub(value, 1, 4)
    if block ~= '' then
      head = string.char(byte(head) + 128) .. sub(head, 2) .. block
    end
    local millis, left = math.floor((expires - now) / 1000) + slack, call('PTTL', KEYS[i])
    if left == -1 or left > millis then
      call('SET', KEYS[i], head .. program[2] .. states, 'KEEPTTL')
    else
      call('PSETEX', KEYS[i], millis, head .. program[2] .. states)
    end
  end
  answers[i] = {lost and 0 or 1, cmsgpack.pack(receipt)}
end
return answers
