-- Renews leases that `check` has reserved: each lease restarts now. An expired lease is acquired
-- again if a slot is free, and is lost otherwise. A key whose states have all expired counts as
-- deleted, even if Redis still stores it. The limits under which such a key was stored do not
-- matter. Unexpired states keep their leases if the algorithms are the same, even if the parameters
-- differ. If the receipt is of other algorithms than the limits, the leases are lost.
--
-- KEYS     the key of each charge; then, if the charges belong to a reservation, the key of its
--          guard. A reservation that has ended is not renewed, and all its leases count as lost
-- ARGV[1]  the instant; empty for the server's own clock
-- ARGV[2]  the time in milliseconds by which a key outlives its state
-- ARGV[3]  the value of a guard that does not exist yet; empty without a guard
-- ARGV[4]  how long to keep the guard, in milliseconds; empty without a guard
-- ARGV[5…] three arguments for each charge: the program with which it was charged; its receipt; and
--          the value of a key without charged units
--
-- Returns for each charge {1 if all leases are held or 0 if one is lost, the new receipt}.
-- `receipt.lua` describes receipts.
local call, struct_pack, struct_unpack = redis.call, struct.pack, struct.unpack
local byte, sub = string.byte, string.sub
local fmod, floor, max, min = math.fmod, math.floor, math.max, math.min
local now, slack, count = tonumber(ARGV[1]), tonumber(ARGV[2]), (#ARGV - 4) / 3
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- (guard.lua)
-- (program.lua)
-- (members.lua)
-- (receipt.lua)
-- (lead.lua)
-- (value.lua)
-- (states.lua)

-- Returns the instant at which a state of the algorithm `kernel` has expired. The state is in
-- `value`, from `start` up to but not including `behind`.
local function expiry(kernel, value, start, behind)
  if kernel == GCRA then
    -- A fraction of a microsecond rounds the instant up. The last byte is the lead.
    local has_fraction = string.find(sub(value, start + 7, behind - 2), '[^%z]')
    return struct_unpack('>I7', value, start) + (has_fraction and 1 or 0)
  elseif kernel == LOG or kernel == LEASE then
    local longest, count = struct_unpack('>I7I4', value, start)
    return count > 0 and struct_unpack('>I7', value, behind - ENTRY_BYTES) + longest or 0
  elseif kernel == BUCKETS then
    local newest, width, _, summed = struct_unpack('>I7I7I7I2', value, start)
    for back = 0, summed - 1 do
      if struct_unpack('>I7', value, behind - 7 * (back + 1)) > 0 then
        return (newest - back + summed) * width
      end
    end
    return 0
  elseif kernel == WEIGHTED then
    local index, previous, current, window = struct_unpack('>I7I7I7I7', value, start)
    return (current > 0 and index + 2 or previous > 0 and index + 1 or 0) * window
  end
  return (struct_unpack('>I7', value, kernel == WINDOW and start + 7 or start))
end

-- Returns the instant at which all of `states`, which are in `value`, have expired.
local function expiry_of(value, states)
  local expires = 0
  for number = 1, #states do
    local kernel, start, behind = states[number].kernel, states[number].start, states[number].behind
    expires = max(expires, expiry(kernel, value, start, behind))
  end
  return expires
end

-- Renews the leases of `units` that have been held since `since`, in the log at `start` in `value`.
-- At most `limit` units may be held. Returns three results: the log, the end of its last lease, and
-- the new start of the leases of these units. Returns nothing if the leases are lost.
local function renew_log(value, start, since, units, limit)
  local longest, count, windows, base, windows_at = struct_unpack('>I7I4I1I3', value, start)
  local first = windows_at + WINDOW_BYTES * windows
  local function entry(number)
    return struct_unpack('>I7I3', value, first + ENTRY_BYTES * number)
  end
  local oldest, high = 0, count
  while oldest < high do
    local middle = floor((oldest + high) / 2)
    if entry(middle) + longest <= now then
      oldest = middle + 1
    else
      high = middle
    end
  end
  local total = count > 0 and select(2, entry(count - 1)) or base
  local entries, base_then, removed, raised =
    remove_units(value, first, count, base, since, units, oldest)
  total = total + raised - removed
  local others = (total - base_then) % TURN
  if removed < units and (units > limit or others > limit - units) then
    return
  end
  local at, added = max(now, count > 0 and entry(count - 1) or 0), {entries}
  while units > 0 do
    local part = min(units, MOST_COST)
    total, units = (total + part) % TURN, units - part
    added[#added + 1] = struct_pack('>I7I3', at, total)
  end
  entries = table.concat(added)
  local window_state = struct_pack('>I4I3I7', 0, base_then, (struct_unpack('>I7', entries)))
  local head = struct_pack('>I7I4I1I3', longest, #entries / ENTRY_BYTES, 1, base_then)
  return head .. window_state .. entries, at + longest, at
end

-- Returns three results: the states of `value` with the leases of `receipt` renewed; the end of the
-- last lease; and whether a lease is lost. `renewed_receipt` is the receipt in the guard, or nil.
local function renew_leases(program, value, states, receipt, renewed_receipt, ledger)
  local written, till, is_lost = {}, 0, false
  for number = 1, #states do
    local kernel, start, behind = states[number].kernel, states[number].start, states[number].behind
    if kernel == LEASE then
      local member = program.members[number]
      receipt[MARKS + number] = latest_lease_start(number, receipt, renewed_receipt, ledger)
      local since = struct_unpack('>I7', receipt[MARKS + number])
      local log, over, at = renew_log(value, start, since, member.cost, member.limit)
      if log then
        written[number], till = log, max(till, over)
        receipt[MARKS + number] = struct_pack('>I7', at)
      else
        is_lost = true
      end
    end
    written[number] = written[number] or sub(value, start, behind - 1)
  end
  return table.concat(written), till, is_lost
end

-- Redis does not roll back a script, so every operation that can fail happens before the first
-- write.
local guard, replies, writes, renewed, ended, expires = KEYS[count + 1], {}, {}, {}, nil, nil
if guard then
  local packed
  ended, expires, packed = read_guard(guard, ARGV[3])
  renewed = packed ~= '' and cmsgpack.unpack(packed) or {}
end
for i = 1, ended and count or 0 do
  replies[i] = {0, ARGV[3 * i + 3]}
end
for i = 1, ended and 0 or count do
  local program, receipt = open_program(ARGV[3 * i + 2]), cmsgpack.unpack(ARGV[3 * i + 3])
  local renewed_receipt = renewed[KEYS[i]]
  if renewed_receipt and not has_marks_of(program, renewed_receipt) then
    renewed_receipt = nil
  end
  local block_end, ledger, value = nil, '', call('GET', KEYS[i]) or ''
  if value ~= '' then
    block_end, ledger, value = open_value(value)
  end
  local is_sound, first, states = pcall(states_in, value)
  if value == '' or is_sound and expiry_of(value, states) <= now then
    value = ARGV[3 * i + 4]
    is_sound, first, states = true, states_in(value)
  end
  local written, till, is_lost = nil, 0, true
  if is_sound and are_of(program, states) and has_marks_of(program, receipt) then
    written, till, is_lost = renew_leases(program, value, states, receipt, renewed_receipt, ledger)
  end
  if till > 0 then
    written = close_value(sub(value, 1, first - 1) .. written, block_end, ledger)
    till = max(till, ledger_until(ledger))
    writes[#writes + 1] = {key = KEYS[i], value = written, till = till}
  end
  if not written then
    -- No lease was renewed, so a receipt of a former renewal is still the latest.
    receipt = renewed[KEYS[i]] or receipt
  end
  renewed[KEYS[i]] = receipt
  replies[i] = {is_lost and 0 or 1, cmsgpack.pack(receipt)}
end
if guard and not ended then
  local state = string.format('%.0f', expires) .. '\0' .. cmsgpack.pack(renewed)
  write_guard(guard, state, tonumber(ARGV[4]))
end
for i = 1, #writes do
  local key, value, till = writes[i].key, writes[i].value, writes[i].till
  local millis, ttl = floor((till - now) / 1000) + slack, call('PTTL', key)
  if ttl == -1 or ttl > millis then
    call('SET', key, value, 'KEEPTTL')
  else
    call('PSETEX', key, millis, value)
  end
end
return replies
