-- Renews a reservation: it expires at another instant.
--
-- KEYS[1]  the guard of the reservation
-- ARGV[1]  the caller's instant
-- ARGV[2]  the instant at which the reservation expires, unless it was renewed before
-- ARGV[3]  the new instant
-- ARGV[4]  how long to keep the guard, in milliseconds
--
-- Returns the first two results of `attempt_end` (guard.lua); 0; and 1 if the reservation has ended
-- and units stay charged, or 0 otherwise.
-- (guard.lua)
local ended, number, renewed, stays_charged = read_guard(KEYS[1], ARGV[2])
if ended then
  return {ended, number, 0, stays_charged and 1 or 0}
elseif number <= tonumber(ARGV[1]) then
  return {EXPIRED, number, 0, 0}
end
local receipts = renewed ~= '' and '\0' .. renewed or ''
write_guard(KEYS[1], ARGV[3] .. receipts, tonumber(ARGV[4]))
return {OUTSTANDING, tonumber(ARGV[3]), 0, 0}
