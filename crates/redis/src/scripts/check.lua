-- Decides charges, each the limits of one rule on one key: all are charged, or none.
--
-- KEYS     the key of each charge; to reserve, then the ledger of each too, where `give_back.lua` writes down what it gives back
-- ARGV[1]  the instant; empty for the server's own
-- ARGV[2]  'charge'; 'reserve', the same with a receipt for each charge; 'deny', as if others had denied it; 'peek' or 'look'
-- ARGV[3]  how many milliseconds a key outlives its state
-- ARGV[4…] the program of each charge, as MessagePack:
--          {head of the value, what follows it, shadow, whether a member counts denials, member, …},
--          a member being {kernel, denials, what its state begins with, the kernel's numbers…}; what is denied is
--          not counted (0), counted to the brim (1), or in full by a member that denies it itself (2)
--
-- Answers {1 admitted, 0 limited; the instant; each value as it was; each receipt}, or {3 blocked; the instant; which, until
-- when}, or {2 left under other numbers; the instant; each value}, or {4 a calendar's windows are not those of the
-- instant; the instant}. The last three charge nothing.
local call, pack, unpack, sub, each = redis.call, struct.pack, struct.unpack, string.sub, unpack
local now, effect, count = tonumber(ARGV[1]), ARGV[2], #ARGV - 3
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- kernels[k](member, value, position, mode): asks and charges the state at `position` of `value`, or a new one
-- where that is nil. Answers the position behind the state, whether it denies, the state once charged, and when
-- that has expired. In the mode CLAMP a cost that is denied fills the state to the brim; in the mode KEEP
-- nothing is charged.
local CLAMP, KEEP = 1, 2
local kernels = {}
local lost = false

-- How many parts of that size a whole is cut into, the last of them smaller perhaps; at least one.
local function parts(whole, size)
  local rest = math.fmod(whole, size)
  return math.max((whole - rest) / size + (rest > 0 and 1 or 0), 1)
end

-- (the kernels that the programs name come here)

local programs, values = {}, {}

-- Blocks come first: the one that stands longest answers.
local longest, blocked
for i = 1, count do
  programs[i] = cmsgpack.unpack(ARGV[3 + i])
  local value = call('GET', KEYS[i]) or ''
  local first = string.byte(value)
  if first and first >= 128 then
    local till = unpack('>I7', value, 5)
    local rank = till == 0 and math.huge or till
    if rank > now and effect ~= 'look' and not (longest and rank <= longest) then
      longest, blocked = rank, {3, now, i - 1, till}
    end
    value = #value == 11 and '' or string.char(first - 128) .. sub(value, 2, 4) .. sub(value, 12)
  end
  values[i] = value
end
if blocked then
  return blocked
end

for i = 1, count do
  if values[i] ~= '' and sub(values[i], 1, 4) ~= programs[i][1] then
    local reply = {2, now}
    for k = 1, count do
      reply[2 + k] = call('GET', KEYS[k]) or ''
    end
    return reply
  end
end

-- The states of charge `i` once charged in that mode, when the last of them has expired, and whether one denies.
local function charge(i, mode)
  local program, value, states, expires, denied = programs[i], values[i], {}, now, false
  local position = value ~= '' and 5 + #program[2] or nil
  for j = 5, #program do
    local member, denies, state, till = program[j], false, nil, nil
    local counts = member[2] == 1 or member[2] == 2 and member.denies
    local how = mode == CLAMP and not counts and KEEP or mode
    position, denies, state, till = kernels[member[1]](member, value, position and position + #member[3], how)
    if denies then
      denied, member.denies = true, true
    end
    states[j - 4] = member[3] .. state
    expires = till > expires and till or expires
  end
  return states, expires, denied
end

-- What is written if all are admitted.
local admitted, charged, expiries, denials = effect == 'deny' and 0 or 1, {}, {}, {}
for i = 1, count do
  charged[i], expiries[i], denials[i] = charge(i)
  if denials[i] and not programs[i][3] then
    admitted = 0
  end
end

if lost then
  return {4, now}
end

-- Whatever can fail is read before the first write.
local ledgers = {}
for i = 1, effect == 'reserve' and count or 0 do
  ledgers[i] = call('GET', KEYS[count + i]) or ''
end

if effect ~= 'peek' and effect ~= 'look' then
  for i = 1, count do
    local program, states, expires = programs[i], charged[i], expiries[i]
    local is_charged = admitted == 1
    if admitted == 1 and denials[i] or admitted == 0 and not program[3] then
      -- Denied by itself or by others; a shadow limit takes no notice of what others deny.
      states, expires = charge(i, CLAMP)
      is_charged = program[4]
    end
    if is_charged and expires > now then
      local millis = math.floor((expires - now) / 1000) + ARGV[3]
      call('PSETEX', KEYS[i], millis, program[1] .. program[2] .. table.concat(states))
    elseif is_charged and values[i] ~= '' then
      call('DEL', KEYS[i])
    end
  end
end
local reply = {admitted, now}
for i = 1, count do
  reply[2 + i] = values[i]
end
if effect == 'reserve' then
  for i = 1, count do
    local receipt = {now, ledgers[i]}
    for j = 5, #programs[i] do
      -- A log's charge is its last entry's; any other state begins with where its charge is.
      local kernel, begin, state = programs[i][j][1], #programs[i][j][3], charged[i][j - 4]
      receipt[j - 2] = (kernel == 3 or kernel == 6) and sub(state, -10, -4) or sub(state, begin + 1, begin + 15)
    end
    reply[2 + count + i] = admitted == 1 and not denials[i] and cmsgpack.pack(receipt) or ''
  end
end
return reply
