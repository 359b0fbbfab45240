-- Window: {…, limit, cost, fits, the most that is counted, grid, its numbers…}
-- The grid is 0, the epoch's, and how long a window is; 1, from the first request, and how long; or 2, a calendar's,
-- the begin of a window, and the ends of that one and a few that follow. An instant beyond them makes `lost` true.
-- A state is what was spent in a window, and when it ends.
kernels[2] = function(member, value, position, mode)
  local _, _, _, limit, cost, fits, most, grid, span = each(member)
  local count, ends = 0, 0
  if position then
    count, ends, position = unpack('>I7I7', value, position)
  end
  if ends <= now then
    count = 0
  end
  local over = not fits or count > limit - cost
  local spent = math.min(cost, math.max(most - count, 0))
  if mode ~= KEEP and spent > 0 then
    if ends <= now then
      if grid == 0 then
        ends = now - math.fmod(now, span) + span
      elseif grid == 1 then
        ends = now + span
      else
        lost = lost or member[9] > now or member[#member] <= now
        local at = 10
        while at < #member and member[at] <= now do
          at = at + 1
        end
        ends = member[at]
      end
    end
    count = count + spent
  end
  return position, over, pack('>I7I7', count, ends), ends
end
