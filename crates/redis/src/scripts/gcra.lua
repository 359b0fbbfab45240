-- GCRA. A state consists of the theoretical arrival time in whole microseconds; the fraction of a
-- microsecond, in parts, if the limit needs it; and the lead (lead.lua).
if kernel == GCRA then
  local lasting, tau, fraction, fits, _, longest
  local lasting_parts, tau_parts, format = 0, 0, '>I7I1'
  lasting, tau, fraction, fits, _, longest, at = struct_unpack(GCRA_NUMBERS, program, at)
  if fraction > 1 then
    local bytes
    lasting_parts, tau_parts, bytes, at = struct_unpack(GCRA_PARTS, program, at)
    format = '>I7I' .. bytes .. 'I1'
  end
  local ahead, parts = 0, 0
  if position then
    local arrival, lead
    if fraction > 1 then
      arrival, parts, lead, position = struct_unpack(format, value, position)
    else
      arrival, lead, position = struct_unpack(format, value, position)
    end
    ahead = arrival - now
    if ahead < 0 then
      ahead, parts = 0, 0
    elseif ahead > tau and is_from_ahead(ahead, lead) then
      from_ahead = true
    end
  end
  local after, after_parts = ahead + lasting, parts + lasting_parts
  if after_parts >= fraction then
    after, after_parts = after + 1, after_parts - fraction
  end
  local over = after > tau or after == tau and after_parts > tau_parts
  local denies = over or fits == 0 or ahead > longest or ahead == longest and parts > 0
  if mode == PEEK or mode == CHARGE and denies then
    return at, position, denies
  end
  if mode == KEEP then
    after, after_parts = ahead, parts
  elseif mode == CLAMP and over then
    after, after_parts = tau, tau_parts
    -- The state already exceeds the limit, because the key was charged under a higher limit.
    if ahead > tau or ahead == tau and parts > tau_parts then
      after, after_parts = ahead, parts
    end
  end
  local expires = now + after
  if fraction > 1 then
    local state = struct_pack(format, expires, after_parts, lead_of(after))
    return at, position, denies, state, expires + (after_parts > 0 and 1 or 0)
  end
  return at, position, denies, struct_pack(format, expires, lead_of(after)), expires
end
