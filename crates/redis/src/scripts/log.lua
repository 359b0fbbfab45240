-- Sliding window log. A state consists of the longest window, the number of entries, the number of
-- windows, the sum of units before the first entry, a record for each window, and all entries,
-- oldest first. The record of a window consists of its first entry, the sum before that entry, and
-- the instant of that entry. An entry consists of an instant, and the sum up to and including the
-- entry. All sums are modulo 2^24, which is far more than a log holds. A concurrency lease is
-- stored as a log entry.
if kernel == LOG or kernel == LEASE then
  local ENTRY_BYTES, TURN, MOST = 10, 2 ^ 24, 2047
  local windows, cost
  windows, cost, at = struct_unpack(LOG_NUMBERS, program, at)
  local count, base, first, window_states = 0, 0, 1, {}
  if position then
    local _, window_count
    _, count, window_count, base, position = struct_unpack('>I7I4I1I3', value, position)
    for w = 1, window_count do
      local head, before, begins
      head, before, begins, position = struct_unpack('>I4I3I7', value, position)
      window_states[w] = {first = head, before = before, begins = begins}
    end
    first = position
    position = position + ENTRY_BYTES * count
  else
    for w = 1, windows do
      window_states[w] = {first = 0, before = 0, begins = 0}
    end
  end
  local function entry(number)
    return struct_unpack('>I7I3', value, first + ENTRY_BYTES * number)
  end
  local last_at, total = 0, base
  if count > 0 then
    last_at, total = entry(count - 1)
    from_ahead = from_ahead or last_at > now + JUMP
  end

  -- Advance the start of every window to the current time.
  local denies, longest, fewest, largest = false, 0, count, 0
  for w = 1, windows do
    local limit, span
    limit, span, at = struct_unpack(LOG_WINDOW, program, at)
    local window = window_states[w]
    local head, before = window.first, window.before
    if head < count and window.begins + span <= now then
      local low, step = head, 1
      while low + step < count and entry(low + step) + span <= now do
        low, step = low + step, step * 2
      end
      local high = min(low + step, count)
      while high - low > 1 do
        local middle = floor((low + high) / 2)
        if entry(middle) + span <= now then
          low = middle
        else
          high = middle
        end
      end
      head, before = high, select(2, entry(low))
      window.first, window.before, window.begins = head, before, head < count and entry(head) or 0
    end
    local sum = count > 0 and (total - before) % TURN or 0
    denies = denies or cost > limit or sum > limit - cost
    longest, fewest, largest = max(longest, span), min(fewest, head), max(largest, limit)
  end
  if mode == PEEK or mode == CHARGE and denies then
    return at, position, denies
  end

  local before_last = count > 1 and select(2, entry(count - 2)) or base
  -- Entries outside of all windows are dropped, so positions are counted from the first kept entry.
  if fewest > 0 then
    base = select(2, entry(fewest - 1))
    for w = 1, windows do
      window_states[w].first = window_states[w].first - fewest
    end
  end
  -- The new entries are `stay` entries of the old value, starting with `fewest`, followed by
  -- `added`.
  local stay, added = count - fewest, {}
  count = stay

  cost = mode ~= KEEP and min(cost, largest) or 0
  if cost > 0 then
    local charged_at = max(now, last_at)
    if count > 0 and last_at == charged_at and (total - before_last) % TURN + cost <= MOST then
      total = (total + cost) % TURN
      stay, added[1] = stay - 1, struct_pack('>I7I3', charged_at, total)
    else
      for w = 1, windows do
        if window_states[w].first == count then
          window_states[w] = {first = count, before = total, begins = charged_at}
        end
      end
      while cost > 0 do
        local part = min(cost, MOST)
        total, cost, count = (total + part) % TURN, cost - part, count + 1
        added[#added + 1] = struct_pack('>I7I3', charged_at, total)
      end
    end
    last_at = charged_at
  end

  -- Only the newest units, up to the largest limit, affect a decision.
  local dropped = 0
  if mode == CLAMP and count > 0 and largest > 0 then
    local function remaining_entry(number)
      if number < stay then
        return entry(fewest + number)
      end
      return struct_unpack('>I7I3', added[number - stay + 1])
    end
    -- Find the first entry with fewer units after it than the limit. The last entry always
    -- qualifies.
    local low, high = -1, count - 1
    while high - low > 1 do
      local middle = floor((low + high) / 2)
      local _, sum = remaining_entry(middle)
      if (total - sum) % TURN >= largest then
        low = middle
      else
        high = middle
      end
    end
    dropped = high
    if dropped > 0 then
      base = select(2, remaining_entry(dropped - 1))
      local begins = remaining_entry(dropped)
      for w = 1, windows do
        local window = window_states[w]
        if window.first < dropped then
          window.first, window.before, window.begins = dropped, base, begins
        end
        window.first = window.first - dropped
      end
      count = count - dropped
    end
  end

  local state = {struct_pack('>I7I4I1I3', longest, count, windows, base)}
  for w = 1, windows do
    local window = window_states[w]
    state[1 + w] = struct_pack('>I4I3I7', window.first, window.before, window.begins)
  end
  local from = first + ENTRY_BYTES * (fewest + dropped)
  state[2 + windows] = sub(value, from, first + ENTRY_BYTES * (fewest + stay) - 1)
  for number = max(dropped - stay, 0) + 1, #added do
    state[#state + 1] = added[number]
  end
  return at, position, denies, table.concat(state), count > 0 and last_at + longest or 0
end
