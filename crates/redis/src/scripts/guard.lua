-- The guard of a reservation ensures that the reservation is ended only once, by any server. A
-- guard exists only after the reservation was renewed or has ended. While the reservation is
-- outstanding, the guard's value is the instant until which the reservation was renewed. If leases
-- were renewed, a zero byte and the packed receipts with the renewed leases follow: a table whose
-- keys are the keys of the charges. So a token from before the renewal also releases these leases.
-- Servers of earlier versions ignore the zero byte and what follows it, because their `tonumber`
-- stops there. After that, the value is HAS_ENDED, followed by the final cost plus 1 unless the
-- reservation has expired, and by STAYS_CHARGED if units that should have been refunded in the hash
-- slot stay charged. STAYS_CHARGED is also a zero byte, which earlier versions ignore. The instants
-- are read from the clocks of the Tidegate servers, because the servers decide when a reservation
-- expires.
--
-- Results: the call has ended the reservation; an earlier call has ended it; it has expired; or it
-- is outstanding.
local ENDED, ENDED_BEFORE, EXPIRED, OUTSTANDING = 1, 0, 2, 3
local HAS_ENDED, STAYS_CHARGED = 'e', '\0'

-- Reads the guard. Returns nil, the instant at which the reservation expires, and the packed
-- receipts with the renewed leases, or '' without renewed leases. If the reservation has ended,
-- returns ENDED_BEFORE, the final cost plus 1 (0 if the reservation has expired), '', and whether
-- units stay charged.
local function read_guard(key, expires)
  local state = redis.call('GET', key) or expires
  local at = string.find(state, '\0', 1, true) or #state + 1
  if string.sub(state, 1, 1) == HAS_ENDED then
    return ENDED_BEFORE, tonumber(string.sub(state, 2, at - 1)) or 0, '', at <= #state
  end
  return nil, tonumber(string.sub(state, 1, at - 1)), string.sub(state, at + 1)
end

-- Writes the guard. The guard's time to live is never reduced, because a newer token of the
-- reservation may expire later than this token. Returns the time to live in milliseconds.
local function write_guard(key, value, keep_ms)
  local ttl = math.max(keep_ms, redis.call('PTTL', key))
  redis.call('SET', key, value, 'PX', ttl)
  return ttl
end

-- Attempts to end a reservation. Returns the result, a number, the time in milliseconds for which
-- the guard is kept (0 if the reservation has not ended), and the receipts from `read_guard`. For
-- ENDED_BEFORE, the number is the number from `read_guard`, and the fifth result is whether units
-- stay charged; otherwise, the number is the instant at which the reservation expires. For ENDED,
-- the caller must write the guard, with the value in the fifth result, followed by STAYS_CHARGED if
-- units stay charged. `attempt` consists of 1 byte, whether the reservation ends because it has
-- expired; the final cost; the caller's instant; the instant at which the reservation expires
-- unless it was renewed; and how long to keep the guard, in milliseconds.
local function attempt_end(key, attempt)
  local is_expiry, cost, instant, expires, keep_ms = struct.unpack('>I1I7I7I7I7', attempt)
  -- `tostring` would round the instant to 14 digits.
  local ended, number, renewed, stays_charged = read_guard(key, string.format('%.0f', expires))
  if ended then
    return ended, number, math.max(redis.call('PTTL', key), 0), renewed, stays_charged
  elseif is_expiry == 1 and number > instant then
    return OUTSTANDING, number, 0, renewed
  elseif is_expiry == 0 and number <= instant then
    return EXPIRED, number, 0, renewed
  end
  local final_cost = is_expiry == 1 and '' or string.format('%.0f', cost + 1)
  return ENDED, number, keep_ms, renewed, HAS_ENDED .. final_cost
end
