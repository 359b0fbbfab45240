-- Reads whether a reservation was renewed or has ended.
--
-- KEYS[1]  the guard of the reservation
--
-- Returns a result and a number, as `read_guard` does (guard.lua); 0; and 1 if the reservation has
-- ended and units stay charged, or 0 otherwise. For an outstanding reservation, the number is the
-- instant until which it was renewed, or 0 if there is no guard.
-- (guard.lua)
local ended, number, _, stays_charged = read_guard(KEYS[1], '0')
return {ended or OUTSTANDING, number, 0, stays_charged and 1 or 0}
