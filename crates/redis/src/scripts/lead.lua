-- The lead of a state is an upper bound on how far the state was ahead of the clock when it was
-- written. A lead takes one byte, and is rounded up by less than one eighth plus half a second. The
-- fast path always stores the lead of a fully charged key. A state that is ahead by more than its
-- lead plus JUMP was written by a clock that was ahead of this clock. The wrong clock can be the
-- clock of a former primary, or this clock before it was set back. The store clamps a state from a
-- wrong clock, because the limit would otherwise deny all requests until the clock has caught up.
local JUMP = 10000000

-- Returns the lead for `ahead` microseconds: the upper five bits are an exponent, the lower three a
-- mantissa from 8 to 15.
local function lead_of(ahead)
  local fraction, exponent = math.frexp(ahead / 2 ^ 19 + 8)
  return 8 * exponent + 16 * fraction - 16 * fraction % 1 - 40
end

-- Returns whether a clock that was ahead wrote a state with this lead. The state is now `ahead`
-- microseconds ahead of the clock.
local function is_from_ahead(ahead, lead)
  local mantissa = lead % 8
  return ahead > ((mantissa + 9) * 2 ^ ((lead - mantissa) / 8) - 8) * 2 ^ 19 + JUMP
end

