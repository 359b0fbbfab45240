-- Parses the states in a value, regardless of the limits under which they were stored.
local SEVERAL = 7
local ENTRY_BYTES, WINDOW_BYTES, TURN, MOST_COST = 10, 14, 2 ^ 24, 2047

-- The length in bytes of an algorithm's parameters in the header, indexed by the form of the
-- parameters. The length is 4 for all other algorithms.
local TERMS = {
  [GCRA] = {[0] = 3, 2, 15},
  [INTERVAL] = {[0] = 8, 8, 14},
  [WINDOW] = {[0] = 4, 4, 7},
}

-- Returns the length in bytes of an algorithm's state at `start` in `value`. `fraction` is the
-- length in bytes of the fraction in a GCRA state.
local function length_of(kernel, value, start, fraction)
  if kernel == GCRA then
    return 8 + fraction
  elseif kernel == LOG or kernel == LEASE then
    local _, count, windows = struct_unpack('>I7I4I1', value, start)
    return 15 + WINDOW_BYTES * windows + ENTRY_BYTES * count
  elseif kernel == BUCKETS then
    return 23 + 7 * select(4, struct_unpack('>I7I7I7I2', value, start))
  end
  return kernel == WEIGHTED and 28 or kernel == INTERVAL and 15 or 14
end

-- Returns the position at which the states of `value` begin. Also returns, for each state, the
-- algorithm, the state's position, and the position after the state. Raises an error if the value
-- was not written by this store.
local function states_in(value)
  local shape, at, count = fmod(byte(value), 8), 1, 1
  if shape == SEVERAL then
    count, at = byte(value, 2), 3
  end
  local states = {}
  for number = 1, count do
    local kind = byte(value, at)
    local kernel = fmod(kind, 8)
    local form, fraction = (kind - kernel) / 8, 0
    if kernel == GCRA and form == 1 then
      fraction = 1
    elseif kernel == GCRA and form == 2 then
      fraction = byte(value, at + 15)
    end
    states[number] = {kernel = kernel, fraction = fraction}
    at = at + 1 + (TERMS[kernel] and TERMS[kernel][form] or 4)
  end
  local first = at
  for number = 1, count do
    local state = states[number]
    state.start, state.behind = at, at + length_of(state.kernel, value, at, state.fraction)
    at = state.behind
  end
  if at ~= #value + 1 then
    error('not a value of this store')
  end
  return first, states
end

-- Returns whether the limits in the parsed `program` (its `members`) have the same algorithms as
-- `states`, in the same order.
local function are_of(program, states)
  for number = 1, #states do
    local member = program.members[number]
    if not member or member.kernel ~= states[number].kernel then
      return false
    end
  end
  return #program.members == #states
end

-- The length in bytes of a mark in a receipt (refund.lua). The length of a mark of GCRA depends on
-- the parameters.
local MARK_BYTES = {
  [INTERVAL] = 15, [WINDOW] = 14, [LOG] = 7, [BUCKETS] = 15, [WEIGHTED] = 15, [LEASE] = 7,
}

-- Returns whether a receipt has a mark for each limit in the parsed `program`, and the algorithms
-- are the same. If not, the rule's limits have changed since the charge, and the charge cannot be
-- found. A receipt of an earlier version does not contain the algorithms, so it must have marks of
-- leases and logs in the positions of leases and logs.
local function has_marks_of(program, receipt)
  local count, kernels = #program.members, receipt[#receipt]
  if type(kernels) == 'number' then
    return #receipt == MARKS + count + 1 and kernels == program.kernels
  end
  for number = 1, count do
    local kernel, mark = program.members[number].kernel, receipt[MARKS + number]
    if not mark or (#mark == MARK_BYTES[LEASE]) ~= (kernel == LOG or kernel == LEASE) then
      return false
    end
  end
  return #receipt == MARKS + count
end

-- Removes up to `units` units that were charged at `since` from a sliding window log, starting with
-- the newest entry of that instant. Also removes all entries before the entry `oldest`. In `value`,
-- the `count` entries begin at `first`, and `base` is the sum of units before them. Only
-- differences between sums have a meaning. Therefore, the function either raises the sums before
-- the removed units or lowers the sums after them, whichever are fewer.
--
-- Returns five results: the remaining entries, the sum before these entries, the number of removed
-- units, the amount by which sums were raised, and a function that maps a position in the old log
-- to a position in the new log. A position consists of a number of entries and the sum before the
-- next entry.
local function remove_units(value, first, count, base, since, units, oldest)
  local function entry(number)
    return struct_unpack('>I7I3', value, first + ENTRY_BYTES * number)
  end
  local function sum_before(number)
    return number > 0 and select(2, entry(number - 1)) or base
  end
  local low, behind = oldest, count
  while low < behind do
    local middle = floor((low + behind) / 2)
    if entry(middle) <= since then
      low = middle + 1
    else
      behind = middle
    end
  end
  local begin, remaining, removed_of = behind, units, {}
  while remaining > 0 and begin > oldest and entry(begin - 1) == since do
    begin = begin - 1
    local own = (sum_before(begin + 1) - sum_before(begin)) % TURN
    removed_of[begin] = min(own, remaining)
    remaining = remaining - removed_of[begin]
  end
  local removed = units - remaining
  local raised = begin - oldest < count - behind and removed or 0

  local pieces = {}
  local function copy(from, upto, by)
    if by == 0 then
      pieces[#pieces + 1] = sub(value, first + ENTRY_BYTES * from, first + ENTRY_BYTES * upto - 1)
      return
    end
    while from + 4 <= upto do
      local at = first + ENTRY_BYTES * from
      local a_at, a, b_at, b, c_at, c, d_at, d = struct_unpack('>I7I3I7I3I7I3I7I3', value, at)
      a, b, c, d = (a + by) % TURN, (b + by) % TURN, (c + by) % TURN, (d + by) % TURN
      pieces[#pieces + 1] = struct_pack('>I7I3I7I3I7I3I7I3', a_at, a, b_at, b, c_at, c, d_at, d)
      from = from + 4
    end
    for number = from, upto - 1 do
      local at, sum = entry(number)
      pieces[#pieces + 1] = struct_pack('>I7I3', at, (sum + by) % TURN)
    end
  end

  copy(oldest, begin, raised)
  local is_empty, removed_so_far = {}, 0
  for number = begin, behind - 1 do
    local at, sum = entry(number)
    local own = (sum - sum_before(number)) % TURN
    removed_so_far = removed_so_far + removed_of[number]
    is_empty[number] = own == removed_of[number]
    if not is_empty[number] then
      pieces[#pieces + 1] = struct_pack('>I7I3', at, (sum - removed_so_far + raised) % TURN)
    end
  end
  copy(behind, count, raised - removed)

  local function move_window(head, before)
    local moved = head - oldest
    for number = begin, min(head, behind) - 1 do
      before = before - removed_of[number]
      moved = moved - (is_empty[number] and 1 or 0)
    end
    return moved, (before + raised) % TURN
  end
  return table.concat(pieces), (sum_before(oldest) + raised) % TURN, removed, raised, move_window
end

-- Returns the instant at which a refund ledger was created; nil without a ledger.
local function ledger_start(ledger)
  return ledger ~= '' and struct_unpack('>I7', ledger, 9) or nil
end

-- Returns whether a refund ledger was created when the states were clamped.
local function is_clamped(ledger)
  return ledger ~= '' and byte(ledger) >= CLAMPED
end

-- Returns the start of a lease in the state, in 7 bytes. `mark` is the start in the receipt. If
-- `mark` was written by a clock that was ahead, the lease starts at the instant at which the states
-- were clamped.
local function lease_start(mark, ledger)
  if struct_unpack('>I7', mark) > now + JUMP and is_clamped(ledger) then
    return sub(ledger, 9, 15)
  end
  return mark
end

-- Returns the later of two starts of a lease: in the receipt of a token, and in the receipt of the
-- guard, which is nil without a renewal. A former token does not know a later renewal. The guard
-- does not know a renewal during a migration of the hash slot.
local function latest_lease_start(number, receipt, renewed_receipt, ledger)
  local own = lease_start(receipt[MARKS + number], ledger)
  local renewed = renewed_receipt and lease_start(renewed_receipt[MARKS + number], ledger) or own
  local own_at, renewed_at = struct_unpack('>I7', own), struct_unpack('>I7', renewed)
  -- A clock that was ahead has written `own`, and the lease was renewed since.
  local is_from_ahead = own_at > now + JUMP
  return (is_from_ahead or renewed_at > own_at) and renewed or own
end
