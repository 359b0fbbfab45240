-- Extends a reservation: it expires at another instant.
--
-- KEYS[1]  the guard of the reservation
-- ARGV[1]  the caller's instant
-- ARGV[2]  the instant at which the reservation expires, unless it was extended before
-- ARGV[3]  the new instant
-- ARGV[4]  for how many milliseconds the guard is kept
--
-- Returns the result (guard.lua) and the instant at which the reservation expires.
-- (guard.lua)
local state = redis.call('GET', KEYS[1])
if state == SETTLED then
  return {ENDED_BEFORE, 0}
end
local expires = tonumber(state or ARGV[2])
if expires <= tonumber(ARGV[1]) then
  return {EXPIRED, expires}
end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
return {OUTSTANDING, tonumber(ARGV[3])}
