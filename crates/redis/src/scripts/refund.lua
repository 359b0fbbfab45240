-- Refunds reservations made by `check`. The core crate's `receipt.rs` explains how much may be
-- refunded.
--
-- KEYS     the key of each charge; then, if the charges belong to a reservation, the key of its
--          guard
-- ARGV[1]  the instant; empty for the server's own clock
-- ARGV[2]  empty, or how the reservation ends (guard.lua)
-- ARGV[3]  the packed receipts with renewed leases; empty if the guard is a key of the call,
--          because the guard contains them
-- ARGV[4…] three arguments for each charge: the program with which it was charged; its receipt,
--          empty to refund nothing; and the part to refund: a program with the cost to refund,
--          empty for the whole charge, or 'leases' for only the leases. Leases are always released
--
-- Returns the first three results of `attempt_end` (guard.lua); 1 if units of the refunded part
-- stay charged, in this call or in the call that has ended the reservation, or 0 otherwise; and the
-- packed receipts with renewed leases.
--
-- The refund ledger is a part of the value. The ledger records when it was created. For each GCRA
-- limit of the key, it also records the total time by which refunds have since moved later requests
-- forward. The ledger is dropped a minute after its last entry. Without a ledger, a refund is
-- computed from the clock alone.
local call, struct_pack, struct_unpack = redis.call, struct.pack, struct.unpack
local byte, sub = string.byte, string.sub
local fmod, floor, max, min = math.fmod, math.floor, math.max, math.min
local now, count, renewed = tonumber(ARGV[1]), #KEYS, ARGV[3]
local guard, guard_value, guard_ttl = nil, nil, 0
-- (guard.lua)
if ARGV[2] ~= '' then
  guard = KEYS[count]
  local status, number
  status, number, guard_ttl, renewed, guard_value = attempt_end(guard, ARGV[2])
  if status ~= ENDED then
    -- For ENDED_BEFORE, the last result is whether units stay charged.
    return {status, number, guard_ttl, guard_value and 1 or 0, ''}
  end
  count = count - 1
end
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local LEDGER_MS, LEDGER_MICROS, MOST_MOVED = 60000, 60000000, 2 ^ 52

-- (program.lua)
-- (members.lua)
-- (receipt.lua)
-- (lead.lua)
-- (value.lua)
-- (states.lua)

-- refund[k](member, part, value, position, mark, since, shift) refunds the `part` of a charge that
-- was made at `since` and is identified by `mark`. The function returns the state at `position` in
-- `value` after the refund, the instant at which this state expires, and, for GCRA, the time by
-- which later requests move forward. `shift` is used only for GCRA: the time refunded to other
-- requests since the charge, or nil if that time is unknown.
local refund = {}

-- Returns how many times `size` fits into `whole`.
local function times(whole, size)
  return (whole - fmod(whole, size)) / size
end

-- A GCRA limit is like a queue of work that is processed in order. Some of a charge's work may
-- already be done. The remaining work is at least the duration of the charge minus the time since
-- the charge. The remaining work is also at least the time from now to the end of the charge, where
-- earlier refunds have moved the end forward.
refund[GCRA] = function(member, part, value, position, mark, since, shift)
  local fraction, format = member.fraction, member.format
  local lasting, lasting_rest = member.lasting, member.lasting_parts
  local most, most_rest = part.lasting, part.lasting_parts
  local function exact(bytes, at)
    if fraction > 1 then
      return struct_unpack(format, bytes, at)
    end
    local whole, lead = struct_unpack('>I7I1', bytes, at)
    return whole, 0, lead
  end
  local arrival, rest, lead = exact(value, position)
  local remaining, remaining_rest = lasting - (now - since), lasting_rest
  local ended, ended_rest = exact(mark, 1)
  local is_last = shift and ended - shift == arrival and ended_rest == rest
  if member.is_queue then
    -- The start times of later requests have already been reported to their clients, so only the
    -- last request can leave a queue.
    remaining, remaining_rest = ended - now, ended_rest
    if ended ~= arrival or ended_rest ~= rest then
      remaining, remaining_rest = 0, 0
    end
  elseif shift then
    ended = ended - shift
    if ended > arrival or ended == arrival and ended_rest > rest then
      remaining, remaining_rest = 0, 0
    elseif ended - now > remaining or ended - now == remaining and ended_rest > remaining_rest then
      remaining, remaining_rest = ended - now, ended_rest
    end
  end
  if remaining > most or remaining == most and remaining_rest > most_rest then
    remaining, remaining_rest = most, most_rest
  elseif remaining < 0 then
    remaining, remaining_rest = 0, 0
  end
  arrival, rest = arrival - remaining, rest - remaining_rest
  if rest < 0 then
    arrival, rest = arrival - 1, rest + fraction
  end
  if arrival < now then
    arrival, rest = now, 0
  end
  -- The lead of the charge is kept, because it is at least the lead of the remaining state.
  local state = fraction > 1 and struct_pack(format, arrival, rest, lead)
    or struct_pack('>I7I1', arrival, lead)
  -- No request comes after the last request, so there is nothing to move forward.
  local advance = is_last and 0 or remaining + (remaining_rest > 0 and 1 or 0)
  return state, arrival + (rest > 0 and 1 or 0), advance
end

-- Refills since the charge may already have returned some of its units.
refund[INTERVAL] = function(member, part, value, position, mark, since)
  local refill, every, cost, most = member.refill, member.every, member.cost, part.cost
  local full_at, last, lead = struct_unpack('>I7I7I1', value, position)
  if full_at <= now then
    return struct_pack('>I7I7I1', 0, 0, 0), 0
  end
  local more = times(full_at - now - 1, every)
  local missing = more * refill + min(last, refill)
  local next_refill = full_at - more * every
  local full_then = struct_unpack('>I7', mark)
  local refill_then = full_then - times(full_then - since - 1, every) * every
  local passed = now < refill_then and 0 or 1 + times(now - refill_then, every)
  local units = max(min(cost - passed * refill, most), 0)
  if units == 0 then
    return struct_pack('>I7I7I1', full_at, last, lead), full_at
  end
  missing = max(missing - units, 0)
  if missing == 0 then
    return struct_pack('>I7I7I1', 0, 0, 0), 0
  end
  more = times(missing - 1, refill)
  full_at = next_refill + more * every
  return struct_pack('>I7I7I1', full_at, missing - more * refill, lead), full_at
end

refund[WINDOW] = function(_, part, value, position, mark)
  local counted, ends = struct_unpack('>I7I7', value, position)
  local _, charged_until = struct_unpack('>I7I7', mark)
  if charged_until == ends then
    counted = max(counted - part.cost, 0)
  end
  ends = counted > 0 and ends or 0
  return struct_pack('>I7I7', counted, ends), ends
end

refund[LOG] = function(_, part, value, position, mark)
  local longest, entry_count, windows, base, windows_at =
    struct_unpack('>I7I4I1I3', value, position)
  local first = windows_at + WINDOW_BYTES * windows
  local since = struct_unpack('>I7', mark)
  local entries, base_then, _, _, move_window =
    remove_units(value, first, entry_count, base, since, part.cost, 0)
  local new_count = #entries / ENTRY_BYTES
  local state = {struct_pack('>I7I4I1I3', longest, new_count, windows, base_then)}
  for w = 1, windows do
    local at = windows_at + WINDOW_BYTES * (w - 1)
    local head, before = move_window(struct_unpack('>I4I3', value, at))
    local begins = head < new_count and struct_unpack('>I7', entries, 1 + ENTRY_BYTES * head) or 0
    state[1 + w] = struct_pack('>I4I3I7', head, before, begins)
  end
  state[2 + windows] = entries
  local last_at = 1 + ENTRY_BYTES * (new_count - 1)
  local expires = new_count > 0 and struct_unpack('>I7', entries, last_at) + longest or 0
  return table.concat(state), expires
end

-- A lease is released as a whole.
refund[LEASE] = function(member, _, value, position, mark)
  return refund[LOG](member, member, value, position, mark)
end

refund[BUCKETS] = function(member, part, value, position, mark)
  local width, cost = member.width, part.cost
  local newest, _, total, bucket_count, first = struct_unpack('>I7I7I7I2', value, position)
  local counts = sub(value, first, first + 7 * bucket_count - 1)
  local back = newest - struct_unpack('>I7', mark)
  if back >= 0 and back < bucket_count then
    local at = 1 + 7 * (bucket_count - 1 - back)
    local counted = struct_unpack('>I7', counts, at)
    local units = min(cost, counted)
    total = total - units
    counts = sub(counts, 1, at - 1) .. struct_pack('>I7', counted - units) .. sub(counts, at + 7)
  end
  local expires = total > 0 and (newest + bucket_count) * width or 0
  return struct_pack('>I7I7I7I2', newest, width, total, bucket_count) .. counts, expires
end

refund[WEIGHTED] = function(_, part, value, position, mark)
  local cost = part.cost
  local index, previous, current, window = struct_unpack('>I7I7I7I7', value, position)
  local back = index - struct_unpack('>I7', mark)
  if back == 0 then
    current = max(current - cost, 0)
  elseif back == 1 then
    previous = max(previous - cost, 0)
  end
  local expires = (current > 0 and index + 2 or previous > 0 and index + 1 or 0) * window
  return struct_pack('>I7I7I7I7', index, previous, current, window), expires
end

-- Returns the time that the refund ledger records for the GCRA limit with the member index
-- `number`.
local function ledger_sum(ledger, number)
  return #ledger >= 15 + 7 * number and struct_unpack('>I7', ledger, 9 + 7 * number) or 0
end

-- Returns the time that a GCRA limit has refunded to other requests since the charge; nil if that
-- time is unknown.
local function refunded_time(ledger, ledger_then, since, number)
  local sum, created = ledger_sum(ledger, number), ledger_start(ledger)
  local is_same = created == ledger_start(ledger_then)
  -- A charge made before the states were clamped can no longer be located in them.
  if is_clamped(ledger) and not is_same then
    return nil
  end
  -- If there is no ledger, although the ledger at the time of the charge would still be kept, the
  -- key was reset.
  local is_reset = not created and ledger_until(ledger_then) > now
  local shift = sum - ((is_same or is_reset) and ledger_sum(ledger_then, number) or 0)
  return now - since < LEDGER_MICROS and shift >= 0 and sum < MOST_MOVED and shift or nil
end

-- Returns whether the states have been converted to other parameters since the charge. If so, the
-- charge may have drained, or the conversion may have dropped it. A conversion's ledger is kept as
-- long as the charge might be refunded.
local function is_converted_since(ledger, ledger_then)
  return ledger ~= '' and fmod(byte(ledger), CLAMPED) >= CONVERTED
    and ledger_start(ledger) ~= ledger_start(ledger_then)
end

-- Whether units that should be refunded stay charged.
local stays_charged = false

-- Returns three results: the states of `value` after the refund; the instant at which all states
-- have expired; and the new ledger, or nil if nothing was added to it. `renewed_receipt` is the
-- receipt with renewed leases in the guard, or nil.
local function refund_states(
  program, receipt, renewed_receipt, unused, value, states, is_same, ledger
)
  local parts = unused == '' and program.members
    or unused ~= 'leases' and open_program(unused).members or {}
  local since, ledger_then = receipt[CHARGED_AT], receipt[CHARGED_LEDGER]
  local written, expires, sums, entries = {}, 0, {}, 0
  is_same = is_same and not is_converted_since(ledger, ledger_then)
  for number = 1, #states do
    local member, mark = program.members[number], receipt[MARKS + number]
    local kernel, start, behind = states[number].kernel, states[number].start, states[number].behind
    local part = parts[number] or member
    -- Nothing is refunded if the units were used, or if the member counts denied requests. Only
    -- leases are released if the state or the mark has other parameters, or if a clock that was
    -- ahead made the charge, because only a lease is identified by its instant.
    local is_other = not is_same or #mark ~= (MARK_BYTES[kernel] or member.mark_bytes)
    local stays = (unused == 'leases' or is_other or since > now + JUMP) and kernel ~= LEASE
    if kernel == LEASE then
      mark = latest_lease_start(number, receipt, renewed_receipt, ledger)
    end
    if stays or member.denials == COUNTED and not program.is_shadow then
      stays_charged = stays_charged or kernel ~= LEASE and unused ~= 'leases'
      written[number], expires = sub(value, start, behind - 1), math.huge
      sums[number] = ledger_sum(ledger, number)
    else
      local shift = refunded_time(ledger, ledger_then, since, number)
      local state, till, advance = refund[kernel](member, part, value, start, mark, since, shift)
      written[number], expires = state, max(expires, till)
      sums[number] = min(ledger_sum(ledger, number) + (advance or 0), MOST_MOVED)
      entries = entries + (advance or 0)
    end
  end
  local new_ledger
  if entries > 0 then
    local created = ledger_start(ledger) or now
    for number = 1, #sums do
      sums[number] = struct_pack('>I7', sums[number])
    end
    local flags = ledger ~= '' and byte(ledger) - fmod(byte(ledger), CONVERTED) or 0
    local till = max(now + LEDGER_MICROS, ledger_until(ledger))
    local header = struct_pack('>I1I7I7', #sums + flags, till, created)
    new_ledger = header .. table.concat(sums)
  end
  return table.concat(written), expires, new_ledger
end

-- Returns whether a limit of the parsed `program` is not a concurrency limit.
local function has_units(program)
  for number = 1, #program.members do
    if program.members[number].kernel ~= LEASE then
      return true
    end
  end
  return false
end

-- Redis does not roll back a script, so every operation that can fail happens before the first
-- write.
local renewed_receipts, writes = renewed ~= '' and cmsgpack.unpack(renewed) or {}, {}
for i = 1, count do
  local raw = ARGV[3 * i + 2] ~= '' and call('GET', KEYS[i]) or ''
  if raw ~= '' then
    local program, receipt = open_program(ARGV[3 * i + 1]), cmsgpack.unpack(ARGV[3 * i + 2])
    local renewed_receipt, unused = renewed_receipts[KEYS[i]], ARGV[3 * i + 3]
    if renewed_receipt and not has_marks_of(program, renewed_receipt) then
      renewed_receipt = nil
    end
    local block_end, ledger, value = open_value(raw)
    if ledger_until(ledger) <= now then
      ledger = ''
    end
    local is_sound, first, states = pcall(states_in, value)
    if is_sound and are_of(program, states) and has_marks_of(program, receipt) then
      local is_same = sub(value, 1, first - 1) == program.head
      local written, expires, new_ledger =
        refund_states(program, receipt, renewed_receipt, unused, value, states, is_same, ledger)
      ledger = new_ledger or ledger
      local is_empty = expires <= now and not block_end and ledger == ''
      written = sub(value, 1, first - 1) .. written
      written = is_empty and '' or close_value(written, block_end, ledger)
      writes[#writes + 1] = {key = KEYS[i], value = written, has_new_ledger = new_ledger ~= nil}
    elseif value ~= '' and unused ~= 'leases' and has_units(program) then
      -- The state or the receipt has other algorithms, so the charge cannot be found in the state.
      stays_charged = true
    end
  end
end

if guard then
  guard_ttl = write_guard(guard, guard_value .. (stays_charged and STAYS_CHARGED or ''), guard_ttl)
end
for i = 1, #writes do
  local key, value = writes[i].key, writes[i].value
  if value == '' then
    call('DEL', key)
  else
    call('SET', key, value, 'KEEPTTL')
  end
  local ttl = writes[i].has_new_ledger and call('PTTL', key) or -1
  if ttl >= 0 and ttl < LEDGER_MS then
    call('PEXPIRE', key, LEDGER_MS)
  end
end
return {ENDED, 0, guard_ttl, stays_charged and 1 or 0, renewed}
