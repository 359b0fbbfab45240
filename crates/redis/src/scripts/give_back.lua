-- Gives back of what `check` has reserved, and of nothing else; core's `receipt.rs` says why that much.
--
-- KEYS     the key of each charge, and then the ledger of each
-- ARGV[1]  the instant; empty for the server's own
-- ARGV[2…] of each charge three: its program, as it was charged; its receipt, empty where nothing is to be given back; and what
--          comes back, the program of a lower cost, empty for all of it, or 'leases' for nothing but those. Leases always do.
--
-- A receipt is {the instant, what the ledger said, of each state where the charge is in it, …}. A ledger says when it was
-- begun, and by how much time each of a key's schedules has moved up since for those behind, 7 bytes each; it is forgotten a minute
-- after the last. What is given back later than that goes by the clock alone.
local call, pack, unpack, sub, each = redis.call, struct.pack, struct.unpack, string.sub, unpack
local now, count = tonumber(ARGV[1]), #KEYS / 2
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local LEDGER_MS, MOST = 60000, 2 ^ 52

-- kernels[k](member, part, value, position, mark, since, shift): the position behind the state at `position` of `value`; the
-- state without the `part` that comes back of what was charged at `since`, which `mark` finds; when that has expired; and of a
-- schedule by how much time those behind it move up. `shift` is how much of it others have given back since, nil if nobody knows.
local kernels = {}

-- How often a size fits into a whole.
local function times(whole, size)
  return (whole - math.fmod(whole, size)) / size
end

-- The time that a charge took is work in a queue, first come first served, some of which may be done. At least what is longer than
-- the time since then is not; and what lies before the place where it ended, once those before it have given back theirs.
kernels[0] = function(member, part, value, position, mark, since, shift)
  local _, _, _, fraction, _, lasting, lasting_rest, _, _, format, queue = each(member)
  local most, most_rest = part[6], part[7]
  local function exact(bytes, at)
    if fraction > 1 then
      return unpack(format, bytes, at)
    end
    local whole, behind = unpack('>I7', bytes, at)
    return whole, 0, behind
  end
  local arrival, rest, behind = exact(value, position)
  local left, left_rest = lasting - (now - since), lasting_rest
  local ended, ended_rest = exact(mark, 1)
  local is_last = shift and ended - shift == arrival and ended_rest == rest
  if queue then
    -- Those behind it have been told when they start: only the last can leave.
    left, left_rest = ended - now, ended_rest
    if ended ~= arrival or ended_rest ~= rest then
      left, left_rest = 0, 0
    end
  elseif shift then
    ended = ended - shift
    if ended > arrival or ended == arrival and ended_rest > rest then
      left, left_rest = 0, 0
    elseif ended - now > left or ended - now == left and ended_rest > left_rest then
      left, left_rest = ended - now, ended_rest
    end
  end
  if left > most or left == most and left_rest > most_rest then
    left, left_rest = most, most_rest
  elseif left < 0 then
    left, left_rest = 0, 0
  end
  arrival, rest = arrival - left, rest - left_rest
  if rest < 0 then
    arrival, rest = arrival - 1, rest + fraction
  end
  if arrival < now then
    arrival, rest = now, 0
  end
  local state = fraction > 1 and pack(format, arrival, rest) or pack('>I7', arrival)
  -- Behind the last in line nobody moves up.
  local moved = is_last and 0 or left + (left_rest > 0 and 1 or 0)
  return behind, state, arrival + (rest > 0 and 1 or 0), moved
end

-- What the refills since then may have brought of it has come back already.
kernels[1] = function(member, part, value, position, mark, since)
  local _, _, _, refill, every, _, cost = each(member)
  local full_at, last, behind = unpack('>I7I7', value, position)
  if full_at <= now then
    return behind, pack('>I7I7', 0, 0), 0
  end
  local more = times(full_at - now - 1, every)
  local missing = more * refill + math.min(last, refill)
  local next_refill = full_at - more * every
  local full_then = unpack('>I7', mark)
  local refill_then = full_then - times(full_then - since - 1, every) * every
  local passed = now < refill_then and 0 or 1 + times(now - refill_then, every)
  local given = math.max(math.min(cost - passed * refill, part[7]), 0)
  if given == 0 then
    return behind, pack('>I7I7', full_at, last), full_at
  end
  missing = math.max(missing - given, 0)
  if missing == 0 then
    return behind, pack('>I7I7', 0, 0), 0
  end
  more = times(missing - 1, refill)
  full_at = next_refill + more * every
  return behind, pack('>I7I7', full_at, missing - more * refill), full_at
end

kernels[2] = function(member, part, value, position, mark)
  local cost = part[5]
  local counted, ends, behind = unpack('>I7I7', value, position)
  if select(2, unpack('>I7I7', mark)) == ends then
    counted = math.max(counted - cost, 0)
  end
  ends = counted > 0 and ends or 0
  return behind, pack('>I7I7', counted, ends), ends
end

kernels[3] = function(member, part, value, position, mark)
  local ENTRY, TURN = 10, 2 ^ 24
  local longest, held, windows, base, after = unpack('>I7I4I1I3', value, position)
  local first, at, left = after + 14 * windows, unpack('>I7', mark), part[5]
  local function entry(number)
    return unpack('>I7I3', value, first + ENTRY * number)
  end
  local function before(number)
    return number > 0 and select(2, entry(number - 1)) or base
  end
  -- The entries of that instant lose it, the newest first; those that come after count less by as much.
  local newest = held - 1
  while newest >= 0 and entry(newest) > at do
    newest = newest - 1
  end
  local taken, total, oldest = {}, 0, newest
  while left > 0 and oldest >= 0 and entry(oldest) == at do
    local own = (select(2, entry(oldest)) - before(oldest)) % TURN
    taken[oldest] = math.min(own, left)
    left, total, oldest = left - taken[oldest], total + taken[oldest], oldest - 1
  end
  local kept, lost, gone = {}, 0, {}
  for number = oldest + 1, held - 1 do
    local instant, sum = entry(number)
    local own = (sum - before(number)) % TURN
    lost = lost + (taken[number] or 0)
    gone[number] = own == taken[number]
    if not gone[number] then
      kept[#kept + 1] = pack('>I7I3', instant, (sum - lost) % TURN)
    end
  end
  local entries = sub(value, first, first + ENTRY * (oldest + 1) - 1) .. table.concat(kept)
  local left_held = #entries / ENTRY
  local places = {}
  for w = 1, windows do
    local head, sum = unpack('>I4I3', value, after + 14 * (w - 1))
    local moved = head
    for number = oldest + 1, math.min(head, newest + 1) - 1 do
      sum = sum - (taken[number] or 0)
      moved = moved - (gone[number] and 1 or 0)
    end
    local begins = moved < left_held and unpack('>I7', entries, 1 + ENTRY * moved) or 0
    places[w] = pack('>I4I3I7', moved, sum % TURN, begins)
  end
  local state = pack('>I7I4I1I3', longest, left_held, windows, base) .. table.concat(places) .. entries
  local expires = left_held > 0 and unpack('>I7', entries, 1 + ENTRY * (left_held - 1)) + longest or 0
  return first + ENTRY * held, state, expires
end

-- Who holds a place gives it back as a whole.
kernels[6] = function(member, _, value, position, mark)
  return kernels[3](member, member, value, position, mark)
end

kernels[4] = function(member, part, value, position, mark)
  local width, cost = member[5], part[7]
  local newest, _, total, held, first = unpack('>I7I7I7I2', value, position)
  local counts, back = sub(value, first, first + 7 * held - 1), newest - unpack('>I7', mark)
  if back >= 0 and back < held then
    local at = 1 + 7 * (held - 1 - back)
    local counted = unpack('>I7', counts, at)
    local taken = math.min(cost, counted)
    total = total - taken
    counts = sub(counts, 1, at - 1) .. pack('>I7', counted - taken) .. sub(counts, at + 7)
  end
  local expires = total > 0 and (newest + held) * width or 0
  return first + 7 * held, pack('>I7I7I7I2', newest, width, total, held) .. counts, expires
end

kernels[5] = function(member, part, value, position, mark)
  local cost = part[6]
  local index, previous, current, window, behind = unpack('>I7I7I7I7', value, position)
  local back = index - unpack('>I7', mark)
  if back == 0 then
    current = math.max(current - cost, 0)
  elseif back == 1 then
    previous = math.max(previous - cost, 0)
  end
  local expires = (current > 0 and index + 2 or previous > 0 and index + 1 or 0) * window
  return behind, pack('>I7I7I7I7', index, previous, current, window), expires
end

-- The time that is in the ledger for the schedule that is member `number`.
local function entered(ledger, number)
  return #ledger >= 7 * number + 7 and unpack('>I7', ledger, 7 * number + 1) or 0
end

-- How much of it others have given back since then, nil if nobody knows.
local function moved(ledger, ledger_then, since, number)
  local sum = entered(ledger, number)
  local is_new = ledger == '' or unpack('>I7', ledger) > since
  local shift = sum - (is_new and 0 or entered(ledger_then, number))
  return now - since < LEDGER_MS * 1000 and shift >= 0 and sum < MOST and shift or nil
end

for i = 1, count do
  local receipt = ARGV[3 * i] ~= '' and cmsgpack.unpack(ARGV[3 * i])
  local program, value = cmsgpack.unpack(ARGV[3 * i - 1]), receipt and call('GET', KEYS[i]) or ''
  local unused = ARGV[3 * i + 1]
  local parts = unused == '' and program or unused ~= 'leases' and cmsgpack.unpack(unused) or {}
  local block, first = '', string.byte(value)
  if first and first >= 128 then
    block, value = sub(value, 5, 11), string.char(first - 128) .. sub(value, 2, 4) .. sub(value, 12)
  end
  -- Of what was left under other numbers nothing is taken but the places of who holds them: the head names the kernels all the
  -- same, and a place is found by its instant.
  local head, own = sub(value, 1, 4), program[1]
  local is_alike = #value > 4 and times(string.byte(head), 16) == times(string.byte(own), 16)
    and sub(value, 5, 4 + #program[2]) == program[2]
  if is_alike then
    local since, ledger_then, ledger = receipt[1], receipt[2], call('GET', KEYS[count + i]) or ''
    local position, states, expires, sums, entries = 5 + #program[2], {}, 0, {}, 0
    for j = 5, #program do
      local member, number = program[j], j - 4
      local start = position + #member[3]
      local kind = #member[3] > 0 and string.byte(value, position) or member[1]
      if math.fmod(kind, 8) ~= member[1] or head ~= own and member[3] == '' and member[1] ~= 6 then
        is_alike = false
        break
      end
      local part = parts[j] or member
      local shift = moved(ledger, ledger_then, since, number)
      local behind, state, till, given = start + 7 + times(kind, 8)
      if member[1] > 0 or head == own then
        behind, state, till, given = kernels[member[1]](
          member, part, value, start, receipt[2 + number], since, shift)
      end
      local stays = (unused == 'leases' or head ~= own) and member[1] ~= 6
      if stays or member[2] == 1 and not program[3] then
        -- It was used, or is counted by one that counts what others deny as well.
        state, till, given = sub(value, start, behind - 1), math.huge, nil
      end
      states[number] = sub(value, position, start - 1) .. state
      expires, position = math.max(expires, till), behind
      sums[number] = pack('>I7', math.min(entered(ledger, number) + (given or 0), MOST))
      entries = entries + (given or 0)
    end
    if not is_alike then
      entries = 0
    elseif expires <= now and block == '' then
      call('DEL', KEYS[i])
    else
      if block ~= '' then
        head = string.char(string.byte(head) + 128) .. sub(head, 2) .. block
      end
      call('SET', KEYS[i], head .. program[2] .. table.concat(states), 'KEEPTTL')
    end
    if entries > 0 then
      local begun = ledger ~= '' and sub(ledger, 1, 7) or pack('>I7', now)
      local others = sub(ledger, 8 + 7 * #sums)
      call('PSETEX', KEYS[count + i], LEDGER_MS, begun .. table.concat(sums) .. others)
    end
  end
end
return count
