-- Fixed window. A state consists of the units charged in the window, and the instant at which the
-- window ends.
--
-- If the instant is outside the calendar windows in the program, `outside_calendar` is set.
if kernel == WINDOW then
  local limit, cost, most, grid, span
  limit, cost, most, grid, span, at = struct_unpack(WINDOW_NUMBERS, program, at)
  -- Returns the end of the calendar window that contains `instant`; nil if the program has no
  -- calendar window at this instant.
  local end_after
  if grid ~= EPOCH and grid ~= FIRST_REQUEST then
    local first, second, third
    first, second, third, at = struct_unpack(CALENDAR_ENDS, program, at)
    end_after = function(instant)
      if span > now or third <= instant then
        return nil
      end
      return first > instant and first or second > instant and second or third
    end
  end
  local count, ends = 0, 0
  if position then
    count, ends, position = struct_unpack('>I7I7', value, position)
  end
  local next_end = ends
  if ends <= now then
    count = 0
  elseif end_after then
    local latest = end_after(now + JUMP)
    outside_calendar = outside_calendar or not latest
    from_ahead = from_ahead or latest and ends > latest
  elseif ends - span > now + JUMP then
    from_ahead = true
  end
  local spent = most - count
  spent = spent < 0 and 0 or spent < cost and spent or cost
  if ends <= now and spent > 0 then
    if grid == EPOCH then
      next_end = now - fmod(now, span) + span
    elseif grid == FIRST_REQUEST then
      next_end = now + span
    else
      next_end = end_after(now)
      outside_calendar = outside_calendar or not next_end
    end
  end
  local denies = count > limit - cost
  if mode == PEEK or mode == CHARGE and denies or outside_calendar then
    return at, position, denies
  end
  if mode ~= KEEP and spent > 0 then
    count, ends = count + spent, next_end
  end
  return at, position, denies, struct_pack('>I7I7', count, ends), ends
end
