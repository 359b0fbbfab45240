-- The guard of a reservation ensures that the reservation ends once, whichever server ends it. A
-- guard exists only after the reservation was extended or has ended. Its value is SETTLED, or the
-- instant until which the reservation was extended. The instants of a guard are those of the servers'
-- clocks, because the servers decide when a reservation expires.
--
-- Results: the reservation has ended now; it had ended before; it has expired; or it is outstanding.
local ENDED, ENDED_BEFORE, EXPIRED, OUTSTANDING = 1, 0, 2, 3
local SETTLED = 'settled'

-- Returns the result, and the instant until which the reservation is outstanding. `attempt` consists
-- of 1 byte, whether the reservation ends because it has expired; the caller's instant; the instant
-- at which the reservation expires unless it was extended; and for how many milliseconds the guard is
-- kept.
local function end_reservation(key, attempt)
  local is_expiry, instant, expires, keep_ms = struct.unpack('>I1I7I7I7', attempt)
  local state = redis.call('GET', key)
  if state == SETTLED then
    return ENDED_BEFORE, 0
  end
  expires = tonumber(state or expires)
  if is_expiry == 1 and expires > instant then
    return OUTSTANDING, expires
  elseif is_expiry == 0 and expires <= instant then
    return EXPIRED, expires
  end
  redis.call('SET', key, SETTLED, 'PX', keep_ms)
  return ENDED, 0
end
