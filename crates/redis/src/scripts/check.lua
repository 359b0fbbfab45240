-- Decides charges, each with the limits of one rule on one key. All of them are charged, or none.
--
-- KEYS     the key of each charge
-- ARGV[1]  the instant; empty for the server's own clock
-- ARGV[2]  'charge'; 'reserve': charge, and return a receipt for each charge; 'deny': charge as if
--          another slot had denied; 'peek' or 'look': charge nothing, and with 'look' ignore blocks
-- ARGV[3]  how many milliseconds a key outlives its state
-- ARGV[4…] the program of each charge, as MessagePack:
--          {header of the value, shadow, whether a member counts denied requests, member, …}.
--          A member is {kernel, denials, the kernel's parameters…}. A denied request is not counted
--          (denials = 0), fills the state completely (1), or is counted in full by a member that
--          itself denies it (2)
-- then     nothing, or three for each charge, for values under other parameters or written by a
--          clock that was ahead: the value that was found; that value converted to the parameters
--          of the program, and clamped if its clock was ahead; and until when the conversion is
--          kept if nothing is charged, 0 to discard it. The first two are empty if the value needs
--          no conversion
--
-- Returns one of
--   {1 admitted or 0 limited, instant, each value that was decided on, each receipt}
--   {3 blocked, instant, index of the charge, end of the block}
--   {2 values under other parameters or written by a clock that was ahead, instant, each value}
--   {4 instant outside of a program's calendar windows, instant}
-- The last three charge nothing.
local call, struct_pack, struct_unpack, spread = redis.call, struct.pack, struct.unpack, unpack
local byte, sub, fmod, floor, max, min = string.byte, string.sub, math.fmod, math.floor, math.max, math.min
local count, now, effect, slack = #KEYS, tonumber(ARGV[1]), ARGV[2], ARGV[3]
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
-- The number of arguments before the first program and before the first conversion, and the index
-- of the first member in a program.
local PROGRAMS, CONVERSIONS, MEMBERS = 3, 3 + count, 4

-- ask[k](member, value, position) evaluates the state at `position` of `value`, or a new state if
-- the position is nil. It returns the position after the state, whether the member denies, and at
-- most 9 values for `charge`.
--
-- charge[k](member, found, mode, value) takes the results of `ask` as `found`. It returns the state
-- after the charge, and when that state expires. In the mode CLAMP a denied cost fills the state
-- completely; in the mode KEEP nothing is charged.
local CLAMP, KEEP, MOST_FOUND = 1, 2, 11
local ask, charge = {}, {}
-- `ask` sets `lost` if the instant is outside of a program's calendar windows, and `from_ahead` if
-- a clock that was ahead has written a state.
local lost, from_ahead = false, false

-- (lead.lua)
-- (value.lua)

-- (the kernels that the programs name come here)

local programs, raws, values, ledgers = {}, {}, {}, {}

-- Blocks take precedence. If several keys are blocked, the block that ends last is reported.
local longest, blocked
for i = 1, count do
  programs[i] = cmsgpack.unpack(ARGV[PROGRAMS + i])
  local value = call('GET', KEYS[i]) or ''
  raws[i], values[i], ledgers[i] = value, value, ''
  if value ~= '' and byte(value) >= HAS_LEDGER then
    local block_end
    block_end, ledgers[i], values[i] = open_value(value)
    if kept_until(ledgers[i]) <= now then
      ledgers[i] = ''
    end
    local rank = block_end and (block_end == 0 and math.huge or block_end) or 0
    if rank > now and effect ~= 'look' and not (longest and rank <= longest) then
      longest, blocked = rank, {3, now, i - 1, block_end}
    end
  end
end
if blocked then
  return blocked
end

-- A state under other parameters, or one that a clock that was ahead has written, is decided on as
-- the client has converted it, unless the value has changed since.
local kept_until_then, outdated = {}, false
for i = 1, count do
  local head, at = programs[i][1], CONVERSIONS + 3 * i
  if values[i] ~= '' and ARGV[at - 2] == raws[i] then
    local _, converted = nil, ARGV[at - 1]
    raws[i], kept_until_then[i] = converted, tonumber(ARGV[at])
    _, ledgers[i], values[i] = open_value(converted)
  elseif values[i] ~= '' and sub(values[i], 1, #head) ~= head then
    outdated = true
  end
end
local function to_convert()
  local reply = {2, now}
  for i = 1, count do
    reply[2 + i] = call('GET', KEYS[i]) or ''
  end
  return reply
end
if outdated then
  return to_convert()
end

-- All members are evaluated before anything is charged.
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
elseif from_ahead then
  return to_convert()
end

-- Returns the states of a program's members after the charge, and when all of them have expired.
-- `before` is the number of members in earlier programs.
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

-- Redis does not roll a script back, so everything that can fail happens before the first write.
local writes, lives, all_states, before = {}, {}, {}, 0
for i = 1, count do
  local program, ledger = programs[i], ledgers[i]
  -- Denied, by this charge itself or by another. A rule in shadow mode ignores denials by others.
  local clamps = admitted == 1 and denied[i] or admitted == 0 and not program[2]
  local is_charged = not clamps and admitted == 1 or clamps and program[3]
  if is_charged then
    local states, expires = charged(program, values[i], before, clamps)
    all_states[i] = states
    expires = max(expires, kept_until(ledger))
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
        -- In a log, the mark of a charge is the instant of the last entry. Any other state begins
        -- with the mark.
        local is_log = kernel == 3 or kernel == 6
        marks[j - MEMBERS + 3] = is_log and sub(state, -10, -4) or sub(state, 1, 15)
      end
      receipt = cmsgpack.pack(marks)
    end
    reply[2 + count + i] = receipt
  end
end
return reply
