-- Decides one request. A request consists of charges, each with the limits of one rule on one key.
-- Either all charges are made, or none.
--
-- KEYS     the key of each charge
-- ARGV[1]  the instant; empty for the server's own clock
-- ARGV[2]  'charge'; 'reserve': charge, and return a receipt for each charge; 'deny': charge as if
--          another slot had denied; 'peek' or 'look': charge nothing, and with 'look' ignore blocks
-- ARGV[3]  the time in milliseconds by which a key outlives its state
-- ARGV[4…] the program of each charge (program.lua)
-- then     nothing, or three arguments for each charge: the value as it was read; the converted
--          value; and the instant until which the converted value is kept if nothing is charged, or
--          -1 if it is never kept because the conversion lost charges. A value is converted if
--          it was stored under parameters other than those of the program, and clamped if it was
--          written by a clock that was ahead. If the value needs neither, the first two arguments
--          are empty
--
-- Returns one of
--   {1 admitted or 0 limited, instant, each value used for the decision, each receipt
--     (receipt.lua)}
--   {3 blocked, instant, index of the charge, end of the block}
--   {2 values under other parameters or written by a clock that was ahead, instant, each value}
--   {4 instant outside a program's calendar windows, instant}
-- The last three charge nothing.
local call, struct_pack, struct_unpack = redis.call, struct.pack, struct.unpack
local byte, sub = string.byte, string.sub
local fmod, floor, max, min = math.fmod, math.floor, math.max, math.min
local count, now, effect, slack = #KEYS, tonumber(ARGV[1]), ARGV[2], ARGV[3]
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
-- The number of arguments before the first program, and before the first conversion.
local PROGRAMS, CONVERSIONS = 3, 3 + count

-- A member of a program is a limit. In the mode CHARGE, a member that denies the request returns no
-- new state. In the mode CLAMP, a denied cost fills the state completely. In the mode KEEP, nothing
-- is charged. In the mode PEEK, no member returns a new state.
local CHARGE, CLAMP, KEEP, PEEK = 1, 2, 3, 4
-- `evaluate` sets `outside_calendar` if the instant is outside a program's calendar windows, and
-- `from_ahead` if a state was written by a clock that was ahead.
local outside_calendar, from_ahead = false, false
-- Whether a program may have a member whose state is long.
local has_long_states = false
-- (has_long_states = true)

-- (program.lua)
-- (receipt.lua)
-- (lead.lua)
-- (value.lua)

-- Evaluates a member that uses the algorithm `kernel`. The member's parameters start at `at` in
-- `program`. Its state starts at `position` in `value`; without a state, `position` is nil. Returns
-- five results: where the parameters end; where the state ends; whether the member denies; the
-- state after the charge; and when this state expires.
--
-- The algorithms are branches of one function, because Redis would execute the definition of each
-- separate function on every call.
local function evaluate(kernel, program, at, value, position, mode)
-- (the kernels that the programs name come here)
end

local charges = {}

-- Blocks take precedence. If several keys are blocked, the block that ends last is reported.
local longest, blocked
for i = 1, count do
  local program, raw = ARGV[PROGRAMS + i], call('GET', KEYS[i]) or ''
  local is_shadow, counts_denied, head_bytes, first = struct_unpack(PROGRAM, program)
  local charge = {
    program = program,
    -- The expected header of the value, and the position of the first member in the program.
    head = sub(program, first, first + head_bytes - 1),
    members = first + head_bytes,
    is_shadow = is_shadow == 1,
    counts_denied = counts_denied == 1,
    -- The fields are the stored value, the value without its block and its ledger, and the ledger.
    raw = raw,
    value = raw,
    ledger = '',
    -- Whether a member denies. If no member denies: the states after the charge, and the instant at
    -- which all states have expired.
    denies = false,
    states = nil,
    expires = now,
  }
  charges[i] = charge
  if raw ~= '' and byte(raw) >= HAS_LEDGER then
    local block_end
    block_end, charge.ledger, charge.value = open_value(raw)
    if ledger_until(charge.ledger) <= now then
      charge.ledger = ''
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

-- A state may have been stored under other parameters, or written by a clock that was ahead. The
-- decision then uses the client's conversion, unless the value has changed since the client read
-- it.
local outdated = false
for i = 1, count do
  local charge, at = charges[i], CONVERSIONS + 3 * i
  if charge.value ~= '' and ARGV[at - 2] == charge.raw then
    charge.raw, charge.converted_until = ARGV[at - 1], tonumber(ARGV[at])
    local _
    _, charge.ledger, charge.value = open_value(charge.raw)
  elseif charge.value ~= '' and sub(charge.value, 1, #charge.head) ~= charge.head then
    outdated = true
  end
end

-- All members are evaluated before anything is written. A member is evaluated and charged in one
-- pass, and its new state is discarded if a later member denies. Building a long state only to
-- discard it would cost more than the rest of the decision. Therefore, if there are several
-- members, a long state is built only after all members have admitted. The header of a value with
-- several members has the code 7 instead of an algorithm ID (states.lua).
local defers = has_long_states and (count > 1 or byte(charges[1].head) == 7)
local deferred = {}
local is_charge = effect == 'charge' or effect == 'reserve'
local admitted = effect ~= 'deny'
if not outdated then
  for i = 1, count do
    local charge = charges[i]
    local program, value, at, expires = charge.program, charge.value, charge.members, now
    local position = value ~= '' and #charge.head + 1 or nil
    local mode = is_charge and admitted and CHARGE or PEEK
    -- The table is created with the usual number of elements, because growing a table is more
    -- expensive.
    local states, number = {'', '', '', ''}, 0
    -- The elements are at the positions CHARGED_AT and CHARGED_LEDGER (receipt.lua).
    local receipt, kernels = effect == 'reserve' and {now, charge.ledger}, 0
    while at <= #program do
      local kernel, denies, state, till = byte(program, at), nil, nil, nil
      number, kernels = number + 1, 8 * kernels + kernel
      if defers and mode == CHARGE and (kernel == LOG or kernel == LEASE or kernel == BUCKETS) then
        deferred[#deferred + 1] = {charge = charge, number = number, at = at, position = position}
        at, position, denies = evaluate(kernel, program, at + 2, value, position, PEEK)
      else
        at, position, denies, state, till = evaluate(kernel, program, at + 2, value, position, mode)
        states[number] = state
      end
      if receipt and state then
        -- In a sliding window log, the mark is the instant of the last entry. Any other state
        -- begins with the mark.
        local is_log = kernel == LOG or kernel == LEASE
        receipt[MARKS + number] = is_log and sub(state, -10, -4) or sub(state, 1, 15)
      end
      if denies then
        charge.denies, mode = true, PEEK
      elseif till and till > expires then
        expires = till
      end
    end
    charge.states, charge.expires = states, expires
    charge.receipt, charge.kernels = receipt, kernels
    admitted = admitted and (charge.is_shadow or not charge.denies)
  end
end
for i = 1, admitted and not from_ahead and #deferred or 0 do
  local charge, number = deferred[i].charge, deferred[i].number
  if not charge.denies then
    local program, at = charge.program, deferred[i].at
    local kernel = byte(program, at)
    local _, _, _, state, till =
      evaluate(kernel, program, at + 2, charge.value, deferred[i].position, CHARGE)
    charge.states[number], charge.expires = state, max(charge.expires, till)
    if charge.receipt then
      charge.receipt[MARKS + number] =
        kernel == BUCKETS and sub(state, 1, 15) or sub(state, -10, -4)
    end
  end
end
if outside_calendar then
  return {4, now}
elseif outdated or from_ahead then
  local reply = {2, now}
  for i = 1, count do
    reply[2 + i] = call('GET', KEYS[i]) or ''
  end
  return reply
end

local reply = {admitted and 1 or 0, now}
for i = 1, count do
  reply[2 + i] = charges[i].raw
end
if effect == 'peek' or effect == 'look' then
  return reply
end

-- Redis does not roll back a script, so every operation that can fail happens before the first
-- write.
for i = 1, count do
  local charge = charges[i]
  -- Whether this charge or another charge denies the request. A rule in shadow mode ignores the
  -- denials of other charges.
  local is_denied = admitted and charge.denies or not admitted and not charge.is_shadow
  if is_denied and charge.counts_denied and charge.converted_until ~= -1 then
    local program, value, at = charge.program, charge.value, charge.members
    local position = value ~= '' and #charge.head + 1 or nil
    local states, expires = {}, now
    while at <= #program do
      local kernel, denials = byte(program, at, at + 1)
      local is_counted, _, state, till = denials == COUNTED, nil, nil, nil
      if denials == IN_FULL then
        _, _, is_counted = evaluate(kernel, program, at + 2, value, position, PEEK)
      end
      local mode = is_counted and CLAMP or KEEP
      at, position, _, state, till = evaluate(kernel, program, at + 2, value, position, mode)
      states[#states + 1] = state
      expires = max(expires, till)
    end
    charge.states, charge.expires = states, expires
  elseif is_denied or not admitted then
    charge.states = nil
  end
  local ledger = charge.ledger
  if charge.states then
    local expires = max(charge.expires, ledger_until(ledger))
    if expires > now then
      charge.millis = floor((expires - now) / 1000) + slack
      charge.written = charge.head .. table.concat(charge.states)
      if ledger ~= '' then
        charge.written = close_value(charge.written, nil, ledger)
      end
    elseif charge.raw ~= '' then
      charge.written = ''
    end
  elseif charge.converted_until and charge.converted_until > now then
    charge.millis, charge.written = floor((charge.converted_until - now) / 1000) + slack, charge.raw
  end
end
for i = 1, count do
  local written = charges[i].written
  if written == '' then
    call('DEL', KEYS[i])
  elseif written then
    call('PSETEX', KEYS[i], charges[i].millis, written)
  end
end

if effect == 'reserve' then
  for i = 1, count do
    local charge, packed = charges[i], ''
    if admitted and not charge.denies then
      charge.receipt[#charge.receipt + 1] = charge.kernels
      packed = cmsgpack.pack(charge.receipt)
    end
    reply[2 + count + i] = packed
  end
end
return reply
