-- Sliding window counter. A state consists of the index of the newest bucket, the bucket width, the
-- total, the number of buckets, and the count of each bucket, oldest first.

if kernel == BUCKETS then
  local COUNT_BYTES = 7
  local limit, width, summed, cost
  limit, width, summed, cost, at = struct_unpack(BUCKETS_NUMBERS, program, at)
  local newest, total, first, passed = (now - fmod(now, width)) / width, 0, nil, summed
  if position then
    local before, _, bucket_count
    before, _, total, bucket_count, first = struct_unpack('>I7I7I7I2', value, position)
    position = first + COUNT_BYTES * bucket_count
    passed = newest - before
    if passed < 0 then
      newest, passed = before, 0
      from_ahead = from_ahead or before * width > now + JUMP
    end
    if passed >= bucket_count then
      total, passed = 0, bucket_count
    elseif passed > 0 then
      -- Subtract the counts of expired buckets, eight at a time.
      local old, remaining = first, passed
      while remaining >= 8 do
        local a, b, c, d, e, f, g, h = struct_unpack('>I7I7I7I7I7I7I7I7', value, old)
        total = total - (a + b + c + d + e + f + g + h)
        old, remaining = old + 8 * COUNT_BYTES, remaining - 8
      end
      for _ = 1, remaining do
        total, old = total - struct_unpack('>I7', value, old), old + COUNT_BYTES
      end
    end
  end
  local denies = total > limit - cost
  if mode == PEEK or mode == CHARGE and denies then
    return at, position, denies
  end

  local counts = string.rep('\0', COUNT_BYTES * passed)
  if passed < summed then
    counts = sub(value, first + COUNT_BYTES * passed, first + COUNT_BYTES * summed - 1) .. counts
  end
  if mode ~= KEEP then
    cost = min(cost, limit)
    total = total + cost
    local own = #counts - COUNT_BYTES + 1
    counts = sub(counts, 1, own - 1) .. struct_pack('>I7', struct_unpack('>I7', counts, own) + cost)
    -- If the total exceeds the limit, the excess is removed from the oldest buckets. All these
    -- buckets except the last become empty.
    if total > limit then
      -- Returns the position of the first non-empty bucket at or after `at`. The caller must ensure
      -- that a non-empty bucket exists.
      local function first_used(counts, at)
        local used = string.find(counts, '[^%z]', at)
        return used - fmod(used - 1, COUNT_BYTES)
      end
      local excess, used = total - limit, first_used(counts, 1)
      local oldest = struct_unpack('>I7', counts, used)
      while oldest < excess do
        excess, used = excess - oldest, first_used(counts, used + COUNT_BYTES)
        oldest = struct_unpack('>I7', counts, used)
      end
      total = limit
      local partial = struct_pack('>I7', oldest - excess)
      counts = string.rep('\0', used - 1) .. partial .. sub(counts, used + COUNT_BYTES)
    end
  end
  local expires = total > 0 and (newest + summed) * width or 0
  local state = struct_pack('>I7I7I7I2', newest, width, total, summed) .. counts
  return at, position, denies, state, expires
end
