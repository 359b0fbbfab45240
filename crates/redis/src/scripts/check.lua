-- Decides charges, each the limits of one rule on one key: all are charged, or none.
--
-- KEYS     the key of each charge
-- ARGV[1]  the instant; empty for the server's own
-- ARGV[2]  'charge'; 'reserve', the same with a receipt for each charge; 'deny', as if others had denied it; 'peek' or 'look'
-- ARGV[3]  how many milliseconds a key outlives its state
-- ARGV[4…] the program of each charge, as MessagePack:
--          {head of the value, shadow, whether a member counts denials, member, …},
--          a member being {kernel, denials, the kernel's numbers…}; what is denied is
--          not counted (0), counted to the brim (1), or in full by a member that denies it itself (2)
-- then     nothing, or of each charge three, for a value that was left in other terms: the value that was found, what it is in the
--          terms of the program, and the instant until which that is kept where nothing is charged, 0 where it is not kept then.
--          The first two are empty where nothing is converted.
--
-- Answers {1 admitted, 0 limited; the instant; each value that was decided on; each receipt}, or {3 blocked; the instant; which,
-- until when}, or {2 left in other terms; the instant; each value}, or {4 a calendar's windows are not those of the
-- instant; the instant}. The last three charge nothing.
local call, struct_pack, struct_unpack, spread = redis.call, struct.pack, struct.unpack, unpack
local byte, sub, fmod, floor, max, min = string.byte, string.sub, math.fmod, math.floor, math.max, math.min
local count, now, effect, slack = #KEYS, tonumber(ARGV[1]), ARGV[2], ARGV[3]
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
-- How many arguments come before the first program, and before the first conversion; members begin at a place in a program.
local PROGRAMS, CONVERSIONS, MEMBERS = 3, 3 + count, 4

-- ask[k](member, value, position) asks the state at `position` of `value`, or a new one where that is nil. It answers the position
-- behind the state, whether it denies, and what charge[k](member, found, mode, value) needs of what was found: at most 9 things.
-- That answers the state once charged, and when it has expired. In the mode CLAMP a cost that is denied fills the state to the
-- brim; in the mode KEEP nothing is charged.
local CLAMP, KEEP, MOST_FOUND = 1, 2, 11
local ask, charge = {}, {}
local lost = false

-- (value.lua)

-- (the kernels that the programs name come here)

local programs, raws, values, ledgers = {}, {}, {}, {}

-- Blocks come first: the one that stands longest answers.
local longest, blocked
for i = 1, count do
  programs[i] = cmsgpack.unpack(ARGV[PROGRAMS + i])
  local value = call('GET', KEYS[i]) or ''
  raws[i], values[i], ledgers[i] = value, value, ''
  if value ~= '' and byte(value) >= HAS_LEDGER then
    local block_end
    block_end, ledgers[i], values[i] = open_value(value)
    local rank = block_end and (block_end == 0 and math.huge or block_end) or 0
    if rank > now and effect ~= 'look' and not (longest and rank <= longest) then
      longest, blocked = rank, {3, now, i - 1, block_end}
    end
  end
end
if blocked then
  return blocked
end

-- A state in other terms is decided on as the store has converted it, if it still stands as it was.
local kept_until_then, outdated = {}, false
for i = 1, count do
  local head = programs[i][1]
  if values[i] ~= '' and sub(values[i], 1, #head) ~= head then
    local at = CONVERSIONS + 3 * (i - 1)
    local found, converted, keeps = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    if found == raws[i] then
      local _
      raws[i], kept_until_then[i] = converted, tonumber(keeps)
      _, ledgers[i], values[i] = open_value(converted)
    else
      outdated = true
    end
  end
end
if outdated then
  local reply = {2, now}
  for i = 1, count do
    reply[2 + i] = call('GET', KEYS[i]) or ''
  end
  return reply
end

-- Every member is asked before anything is charged.
local admitted, denied, asked, number = effect == 'deny' and 0 or 1, {}, {}, 0
for i = 1, count do
  local program, value = programs[i], values[i]
  local position = value ~= '' and #program[1] + 1 or nil
  for j = MEMBERS, #program do
    local member = program[j]
    local found = {ask[member[1]](member, value, position)}
    number, position = number + 1, found[1]
    asked[number] = found
    denied[i] = denied[i] or found[2]
  end
  if denied[i] and not program[2] then
    admitted = 0
  end
end
if lost then
  return {4, now}
end

-- The states of the members of a program once charged, the first of them being `before + 1` of all that were asked; and when all have
-- expired.
local function charged(program, value, before, clamps)
  local states, expires = {}, now
  for j = MEMBERS, #program do
    local member, found, mode = program[j], asked[before + j - MEMBERS + 1], nil
    if clamps then
      local counts = member[2] == 1 or member[2] == 2 and found[2]
      mode = counts and CLAMP or KEEP
    end
    local state, till = charge[member[1]](member, found, mode, value)
    states[j - MEMBERS + 1] = state
    if till > expires then
      expires = till
    end
  end
  return states, expires
end

local reply = {admitted, now}
for i = 1, count do
  reply[2 + i] = raws[i]
end
if effect == 'peek' or effect == 'look' then
  return reply
end

-- Whatever can fail comes before the first write.
local writes, lives, all_states, before = {}, {}, {}, 0
for i = 1, count do
  local program, ledger = programs[i], ledgers[i]
  -- Denied by itself or by others; a shadow limit takes no notice of what others deny.
  local clamps = admitted == 1 and denied[i] or admitted == 0 and not program[2]
  local is_charged = not clamps and admitted == 1 or clamps and program[3]
  if is_charged then
    local states, expires = charged(program, values[i], before, clamps)
    all_states[i] = states
    local till = kept_until(ledger)
    if till <= now then
      ledger = ''
    elseif till > expires then
      expires = till
    end
    if expires > now then
      lives[i] = floor((expires - now) / 1000) + slack
      writes[i] = program[1] .. table.concat(states)
      if ledger ~= '' then
        writes[i] = close_value(writes[i], nil, ledger)
      end
    elseif raws[i] ~= '' then
      writes[i] = ''
    end
  elseif kept_until_then[i] and kept_until_then[i] > now then
    lives[i], writes[i] = floor((kept_until_then[i] - now) / 1000) + slack, raws[i]
  end
  before = before + #program - MEMBERS + 1
end
for i = 1, count do
  if writes[i] == '' then
    call('DEL', KEYS[i])
  elseif writes[i] then
    call('PSETEX', KEYS[i], lives[i], writes[i])
  end
end

if effect == 'reserve' then
  for i = 1, count do
    local program, states, receipt = programs[i], all_states[i], ''
    if admitted == 1 and not denied[i] then
      local marks = {now, ledgers[i]}
      for j = MEMBERS, #program do
        local kernel, state = program[j][1], states[j - MEMBERS + 1]
        -- A log's charge is its last entry's; any other state begins with where its charge is.
        local is_log = kernel == 3 or kernel == 6
        marks[j - MEMBERS + 3] = is_log and sub(state, -10, -4) or sub(state, 1, 15)
      end
      receipt = cmsgpack.pack(marks)
    end
    reply[2 + count + i] = receipt
  end
end
return reply
