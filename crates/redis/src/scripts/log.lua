-- Log: {…, the largest limit, cost, limit and span of a window, limit and span of the next, …}
-- A state is the longest window; how many entries and windows there are; what was admitted before the first entry; of
-- each window the first entry inside, what was admitted before it, and its instant; and the entries, oldest first: an
-- instant, and what was admitted up to and with it. All of that is counted modulo 2^24, far more than a log holds.
local ENTRY, TURN, MOST = 10, 2 ^ 24, 2047

kernels[3] = function(member, value, position, mode)
  local largest, cost, windows = member[4], member[5], (#member - 5) / 2
  local count, base, first, places, entries = 0, 0, 1, {}, ''
  if position then
    local _, held
    _, count, held, base, position = unpack('>I7I4I1I3', value, position)
    for w = 1, held do
      local head, before, at
      head, before, at, position = unpack('>I4I3I7', value, position)
      places[w] = {head, before, at}
    end
    first, entries = position, value
    position = position + ENTRY * count
  else
    for w = 1, windows do
      places[w] = {0, 0, 0}
    end
  end
  local function entry(number)
    return unpack('>I7I3', entries, first + ENTRY * number)
  end
  local last_at, total = 0, base
  if count > 0 then
    last_at, total = entry(count - 1)
  end

  -- Every window moves to where it begins now.
  local over, longest, fewest = false, 0, count
  for w = 1, windows do
    local place, limit, span = places[w], member[4 + 2 * w], member[5 + 2 * w]
    local low, step = place[1], 1
    if low < count and place[3] + span <= now then
      while low + step < count and entry(low + step) + span <= now do
        low, step = low + step, step * 2
      end
      local high = math.min(low + step, count)
      while high - low > 1 do
        local middle = math.floor((low + high) / 2)
        if entry(middle) + span <= now then
          low = middle
        else
          high = middle
        end
      end
      local _, before = entry(low)
      places[w] = {high, before, high < count and entry(high) or 0}
    end
    local sum = count > 0 and (total - places[w][2]) % TURN or 0
    over = over or cost > limit or sum > limit - cost
    longest, fewest = math.max(longest, span), math.min(fewest, places[w][1])
  end

  -- What has left all windows is forgotten; heads count from what is kept.
  local kept = sub(entries, first + ENTRY * fewest, first + ENTRY * count - 1)
  local before_last = base
  if count > 1 then
    before_last = select(2, entry(count - 2))
  end
  if fewest > 0 then
    base = select(2, entry(fewest - 1))
  end
  count, entries, first = count - fewest, kept, 1
  for w = 1, windows do
    places[w][1] = places[w][1] - fewest
  end

  cost = mode ~= KEEP and math.min(cost, largest) or 0
  if cost > 0 then
    local at = math.max(now, last_at)
    if count > 0 and last_at == at and (total - before_last) % TURN + cost <= MOST then
      total = (total + cost) % TURN
      entries = sub(entries, 1, -ENTRY - 1) .. pack('>I7I3', at, total)
    else
      for w = 1, windows do
        if places[w][1] == count then
          places[w] = {count, total, at}
        end
      end
      while cost > 0 do
        local part = math.min(cost, MOST)
        total, cost, count = (total + part) % TURN, cost - part, count + 1
        entries = entries .. pack('>I7I3', at, total)
      end
    end
    last_at = at
  end

  -- Beyond the newest units of the largest limit nothing can decide anything.
  if mode == CLAMP and count > 0 and largest > 0 then
    local dropped, dropped_base = 0, base
    local at, sum = entry(0)
    while (total - sum) % TURN >= largest do
      dropped, dropped_base = dropped + 1, sum
      at, sum = entry(dropped)
    end
    for w = 1, windows do
      places[w] = places[w][1] < dropped and {dropped, dropped_base, at} or places[w]
      places[w][1] = places[w][1] - dropped
    end
    count, base, entries = count - dropped, dropped_base, sub(entries, ENTRY * dropped + 1)
  end

  local state = {pack('>I7I4I1I3', longest, count, windows, base)}
  for w = 1, windows do
    state[1 + w] = pack('>I4I3I7', each(places[w]))
  end
  state[2 + windows] = entries
  return position, over, table.concat(state), count > 0 and last_at + longest or 0
end
