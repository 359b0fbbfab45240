-- Buckets: {…, limit, width, summed, cost, fits}
-- A state is the number of the newest bucket, how long one is, what all hold, how many they are, and what each holds,
-- the oldest first.
kernels[4] = function(member, value, position, mode)
  local _, _, _, limit, width, summed, cost, fits = each(member)
  local newest, total, counts = (now - math.fmod(now, width)) / width, 0, nil
  if position then
    local before, _, held
    before, _, total, held, position = unpack('>I7I7I7I2', value, position)
    counts = sub(value, position, position + 7 * held - 1)
    position = position + 7 * held
    local passed = newest - before
    if passed < 0 then
      newest, passed = before, 0
    end
    if passed >= held then
      counts, total = nil, 0
    elseif passed > 0 then
      for at = 1, 7 * passed, 7 do
        total = total - unpack('>I7', counts, at)
      end
      counts = sub(counts, 7 * passed + 1) .. string.rep('\0', 7 * passed)
    end
  end
  counts = counts or string.rep('\0', 7 * summed)
  local over = not fits or total > limit - cost
  if mode ~= KEEP then
    cost = math.min(cost, limit)
    total = total + cost
    counts = sub(counts, 1, -8) .. pack('>I7', unpack('>I7', counts, #counts - 6) + cost)
    -- What is beyond the limit leaves the oldest.
    local at = 1
    while total > limit do
      local count = unpack('>I7', counts, at)
      local dropped = math.min(count, total - limit)
      total = total - dropped
      counts = sub(counts, 1, at - 1) .. pack('>I7', count - dropped) .. sub(counts, at + 7)
      at = at + 7
    end
  end
  local expires = total > 0 and (newest + summed) * width or 0
  return position, over, pack('>I7I7I7I2', newest, width, total, summed) .. counts, expires
end
