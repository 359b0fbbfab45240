-- Renews the places that `check` has reserved: who holds one holds it from now on, as if it had just been taken. One that is not there
-- any more is taken again if it is free, and else lost. What has expired may be gone or not, and is as good as gone, whichever limits
-- left it. What others left that has not keeps its places, if the kernels are the same.
--
-- KEYS     the key of each charge
-- ARGV[1]  the instant; empty for the server's own
-- ARGV[2]  how many milliseconds a key outlives its state
-- ARGV[3…] of each charge three: its program, as it was charged; its receipt; and the value of a key that has spent nothing
--
-- Answers of each charge {1 all are held, 0 one is lost; the receipt from now on}. `give_back.lua` says what is in one.
local call, pack, unpack, sub, each = redis.call, struct.pack, struct.unpack, string.sub, unpack
local byte, find, fmod = string.byte, string.find, math.fmod
local now, slack = tonumber(ARGV[1]), tonumber(ARGV[2])
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local LEASE, SEVERAL, ENTRY, TURN, MOST = 6, 7, 10, 2 ^ 24, 2047

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
    return unpack('>I7', value, start) + (find(sub(value, start + 7, behind - 1), '[^%z]') and 1 or 0)
  elseif kernel == 3 or kernel == LEASE then
    local longest, count = unpack('>I7I4', value, start)
    return count > 0 and unpack('>I7', value, behind - ENTRY) + longest or 0
  elseif kernel == 4 then
    local newest, width, _, summed = unpack('>I7I7I7I2', value, start)
    for back = 0, summed - 1 do
      if unpack('>I7', value, behind - 7 * (back + 1)) > 0 then
        return (newest - back + summed) * width
      end
    end
    return 0
  elseif kernel == 5 then
    local index, previous, current, window = unpack('>I7I7I7I7', value, start)
    return (current > 0 and index + 2 or previous > 0 and index + 1 or 0) * window
  end
  return (unpack('>I7', value, kernel == 2 and start + 7 or start))
end

-- The states of `value`, whichever limits left them: of each its kernel, where it begins, with its kind and without, and where what
-- follows begins; and when all have expired. Raises an error where it is no value of ours.
local function states_in(value)
  local shape, begin, count = math.floor(byte(value) / 16), 5, 1
  if shape == SEVERAL then
    begin, count = 6, byte(value, 5)
  end
  local states, expired_at = {}, 0
  for number = 1, count do
    local kernel, fraction, start = shape, #value - 11, begin
    if shape == SEVERAL then
      local kind = byte(value, begin)
      kernel = fmod(kind, 8)
      fraction, start = (kind - kernel) / 8, begin + 1
    end
    local behind = start + length(kernel, value, start, fraction)
    expired_at = math.max(expired_at, expiry(kernel, value, start, behind))
    states[number] = {kernel, begin, start, behind}
    begin = behind
  end
  return states, expired_at
end

-- Whether the members of `program` are of these kernels.
local function are_of(program, states)
  for number = 1, #states do
    local member = program[4 + number]
    if not member or member[1] ~= states[number][1] then
      return false
    end
  end
  return #program == 4 + #states
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

-- The states of `value` with the places of `receipt` renewed; the end of the last lease; and whether one is lost.
local function with_places(program, value, states, receipt)
  local written, till, lost = {}, 0, false
  for number = 1, #states do
    local member, kernel, begin, start, behind = program[4 + number], each(states[number])
    written[number] = sub(value, begin, behind - 1)
    if kernel == LEASE then
      local since = unpack('>I7', receipt[2 + number])
      local log, over, at = renewed(value, start, since, member[5], member[6])
      if log then
        written[number] = sub(value, begin, start - 1) .. log
        till, receipt[2 + number] = math.max(till, over), pack('>I7', at)
      else
        lost = true
      end
    end
  end
  return table.concat(written), till, lost
end

local answers = {}
for i = 1, #KEYS do
  local program, receipt, block = cmsgpack.unpack(ARGV[3 * i]), cmsgpack.unpack(ARGV[3 * i + 1]), ''
  local value = call('GET', KEYS[i]) or ''
  local first = byte(value)
  if first and first >= 128 then
    block, value = sub(value, 5, 11), string.char(first - 128) .. sub(value, 2, 4) .. sub(value, 12)
  end
  local sound, states, expired_at = pcall(states_in, value)
  if #value <= 4 or sound and expired_at <= now then
    value = ARGV[3 * i + 2]
    sound, states = true, states_in(value)
  end
  local written, till, lost = nil, 0, true
  if sound and are_of(program, states) then
    written, till, lost = with_places(program, value, states, receipt)
  end
  if till > 0 then
    local head = sub(value, 1, 4)
    if block ~= '' then
      head = string.char(byte(head) + 128) .. sub(head, 2) .. block
    end
    local millis, left = math.floor((till - now) / 1000) + slack, call('PTTL', KEYS[i])
    if left == -1 or left > millis then
      call('SET', KEYS[i], head .. program[2] .. written, 'KEEPTTL')
    else
      call('PSETEX', KEYS[i], millis, head .. program[2] .. written)
    end
  end
  answers[i] = {lost and 0 or 1, cmsgpack.pack(receipt)}
end
return answers
