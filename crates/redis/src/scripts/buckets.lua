-- Buckets: {…, limit, width, summed, cost, fits}
--
-- A state is the number of the newest bucket, the width of a bucket, the total, the number of
-- buckets, and the count of each, oldest first.
local COUNT_BYTES = 7

-- Returns the sum of `buckets` buckets from `at` on, eight at a time.
local function sum_of(bytes, at, buckets)
  local sum = 0
  while buckets >= 8 do
    local a, b, c, d, e, f, g, h = struct_unpack('>I7I7I7I7I7I7I7I7', bytes, at)
    sum, at, buckets = sum + a + b + c + d + e + f + g + h, at + 8 * COUNT_BYTES, buckets - 8
  end
  for _ = 1, buckets do
    sum, at = sum + struct_unpack('>I7', bytes, at), at + COUNT_BYTES
  end
  return sum
end

-- Returns the position of the first bucket from `at` on that is not empty. There must be one.
local function first_used(counts, at)
  local used = string.find(counts, '[^%z]', at)
  return used - fmod(used - 1, COUNT_BYTES)
end

ask[4] = function(member, value, position)
  local _, _, limit, width, summed, cost, fits = spread(member)
  local newest, total, first, passed = (now - fmod(now, width)) / width, 0, nil, summed
  if position then
    local before, _, held
    before, _, total, held, first = struct_unpack('>I7I7I7I2', value, position)
    position = first + COUNT_BYTES * held
    passed = newest - before
    if passed < 0 then
      newest, passed = before, 0
      from_ahead = from_ahead or before * width > now + JUMP
    end
    if passed >= held then
      total, passed = 0, held
    elseif passed > 0 then
      total = total - sum_of(value, first, passed)
    end
  end
  return position, not fits or total > limit - cost, newest, total, first, passed
end

charge[4] = function(member, found, mode, value)
  local _, _, limit, width, summed, cost = spread(member)
  local _, _, newest, total, first, passed = spread(found, 1, MOST_FOUND)
  local counts = string.rep('\0', COUNT_BYTES * passed)
  if passed < summed then
    counts = sub(value, first + COUNT_BYTES * passed, first + COUNT_BYTES * summed - 1) .. counts
  end
  if mode ~= KEEP then
    cost = min(cost, limit)
    total = total + cost
    local last_at = #counts - COUNT_BYTES + 1
    counts = sub(counts, 1, last_at - 1) .. struct_pack('>I7', struct_unpack('>I7', counts, last_at) + cost)
    -- The excess over the limit is taken from the oldest buckets: all of those that it empties, and
    -- a part of the next.
    if total > limit then
      local excess, at = total - limit, first_used(counts, 1)
      local oldest = struct_unpack('>I7', counts, at)
      while oldest < excess do
        excess, at = excess - oldest, first_used(counts, at + COUNT_BYTES)
        oldest = struct_unpack('>I7', counts, at)
      end
      total = limit
      counts = string.rep('\0', at - 1) .. struct_pack('>I7', oldest - excess) .. sub(counts, at + COUNT_BYTES)
    end
  end
  local expires = total > 0 and (newest + summed) * width or 0
  return struct_pack('>I7I7I7I2', newest, width, total, summed) .. counts, expires
end
