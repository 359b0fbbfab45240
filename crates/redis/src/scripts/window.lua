-- Window: {…, limit, cost, fits, the most that is counted, grid, its parameters…}
--
-- The grid is 0, windows since the epoch, and their length; 1, windows from the first request, and
-- their length; or 2, a calendar, the start of a window, and the ends of this window and a few
-- after it. An instant outside of those sets `lost`. A state is the units spent in a window, and
-- when it ends.
ask[2] = function(member, value, position)
  local EPOCH, FIRST_REQUEST, FIRST_END = 0, 1, 9
  local _, _, limit, cost, fits, most, grid, span = spread(member)
  local count, ends = 0, 0
  if position then
    count, ends, position = struct_unpack('>I7I7', value, position)
  end
  local next_end = ends
  if ends <= now then
    count = 0
  elseif grid ~= EPOCH and grid ~= FIRST_REQUEST then
    local at = FIRST_END
    while at < #member and member[at] <= now + JUMP do
      at = at + 1
    end
    lost = lost or span > now or member[at] <= now + JUMP
    from_ahead = from_ahead or ends > member[at]
  elseif ends - span > now + JUMP then
    from_ahead = true
  end
  local spent = min(cost, max(most - count, 0))
  if ends <= now and spent > 0 then
    if grid == EPOCH then
      next_end = now - fmod(now, span) + span
    elseif grid == FIRST_REQUEST then
      next_end = now + span
    else
      lost = lost or span > now or member[#member] <= now
      local at = FIRST_END
      while at < #member and member[at] <= now do
        at = at + 1
      end
      next_end = member[at]
    end
  end
  return position, not fits or count > limit - cost, count, ends, spent, next_end
end

charge[2] = function(_, found, mode)
  local _, _, count, ends, spent, next_end = spread(found, 1, MOST_FOUND)
  if mode ~= KEEP and spent > 0 then
    count, ends = count + spent, next_end
  end
  return struct_pack('>I7I7', count, ends), ends
end
