-- Interval: {…, refill, every, capacity, cost, fits}
--
-- A state is the instant at which the bucket is full again, the size of the last refill before
-- that, and the lead.

-- Returns how many parts of this size a whole has, rounded up; at least one.
local function parts(whole, size)
  local rest = fmod(whole, size)
  return max((whole - rest) / size + (rest > 0 and 1 or 0), 1)
end

ask[1] = function(member, value, position)
  local _, _, refill, every, capacity, cost, fits = spread(member)
  local full_at, last = 0, 0
  if position then
    local lead
    full_at, last, lead, position = struct_unpack('>I7I7I1', value, position)
    from_ahead = from_ahead or full_at > now and is_from_ahead(full_at - now, lead)
  end
  local missing, next_refill = 0, now + every
  if full_at > now then
    local refills = parts(full_at - now, every)
    -- A refill never exceeds `refill`.
    missing = (refills - 1) * refill + min(last, refill)
    next_refill = full_at - (refills - 1) * every
  end
  return position, not fits or missing > capacity - cost, missing, next_refill, full_at, last
end

charge[1] = function(member, found, mode)
  local _, _, refill, every, capacity, cost = spread(member)
  local _, _, missing, next_refill, full_at, last = spread(found, 1, MOST_FOUND)
  -- A state that exceeds the capacity, because of higher limits, is kept.
  if mode ~= KEEP and missing < capacity then
    missing = min(missing + cost, capacity)
    local refills = parts(missing, refill)
    full_at = next_refill + (refills - 1) * every
    last = missing - (refills - 1) * refill
  end
  return struct_pack('>I7I7I1', full_at, last, lead_of(max(full_at - now, 0))), full_at
end
