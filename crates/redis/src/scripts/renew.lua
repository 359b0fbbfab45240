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

-- The states of `value` from `position` on, those of a program's members, renewed; the end of the last lease; and whether one is lost.
-- Nothing where other kernels left them.
local function states_of(program, value, position, receipt)
  local states, expires, lost = {}, 0, false
  for j = 5, #program do
    local member, number = program[j], j - 4
    local kind = #member[3] > 0 and string.byte(value, position) or member[1]
    if math.fmod(kind, 8) ~= member[1] then
      return
    end
    local start = position + #member[3]
    local behind = start + length(member[1], value, start, (kind - member[1]) / 8)
    local state = sub(value, start, behind - 1)
    if member[1] == LEASE then
      local since = unpack('>I7', receipt[2 + number])
      local log, till, at = renewed(value, start, since, member[5], member[6])
      if log then
        state, expires, receipt[2 + number] = log, math.max(expires, till), pack('>I7', at)
      else
        lost = true
      end
    end
    states[number], position = sub(value, position, start - 1) .. state, behind
  end
  return table.concat(states), expires, lost
end

local answers = {}
for i = 1, #KEYS do
  local program, receipt, block = cmsgpack.unpack(ARGV[3 * i]), cmsgpack.unpack(ARGV[3 * i + 1]), ''
  local value = call('GET', KEYS[i]) or ''
  local first = string.byte(value)
  if first and first >= 128 then
    block, value = sub(value, 5, 11), string.char(first - 128) .. sub(value, 2, 4) .. sub(value, 12)
  end
  if #value <= 4 then
    value = ARGV[3 * i + 2]
  end
  local head, own, states, expires, lost = sub(value, 1, 4), program[1], nil, nil, true
  -- The head names the kernel, whatever the numbers.
  local is_alike = string.byte(head) - math.fmod(string.byte(head), 16) == string.byte(own) - math.fmod(string.byte(own), 16)
  if is_alike and sub(value, 5, 4 + #program[2]) == program[2] then
    states, expires, lost = states_of(program, value, 5 + #program[2], receipt)
  end
  if states and expires > 0 then
    if block ~= '' then
      head = string.char(string.byte(head) + 128) .. sub(head, 2) .. block
    end
    local millis, left = math.floor((expires - now) / 1000) + slack, call('PTTL', KEYS[i])
    if left == -1 or left > millis then
      call('SET', KEYS[i], head .. program[2] .. states, 'KEEPTTL')
    else
      call('PSETEX', KEYS[i], millis, head .. program[2] .. states)
    end
  end
  answers[i] = {(states and not lost) and 1 or 0, cmsgpack.pack(receipt)}
end
return answers
