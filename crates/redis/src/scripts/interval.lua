-- Interval: {…, refill, every, capacity, cost, fits}
-- A state is when the bucket is full again, and what its last refill brings.
kernels[1] = function(member, value, position, mode)
  local _, _, _, refill, every, capacity, cost, fits = each(member)
  local full_at, last = 0, 0
  if position then
    full_at, last, position = unpack('>I7I7', value, position)
  end
  local missing, next_refill = 0, now + every
  if full_at > now then
    local refills = parts(full_at - now, every)
    -- Whoever left it under other numbers may have left more to the last refill than there is in one here.
    missing = (refills - 1) * refill + math.min(last, refill)
    next_refill = full_at - (refills - 1) * every
  end
  local over = not fits or missing > capacity - cost
  -- What lies beyond the brim, by wider numbers, stays there.
  if mode ~= KEEP and missing < capacity then
    missing = math.min(missing + cost, capacity)
    local refills = parts(missing, refill)
    full_at = next_refill + (refills - 1) * every
    last = missing - (refills - 1) * refill
  end
  return position, over, pack('>I7I7', full_at, last), full_at
end
