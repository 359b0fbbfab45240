-- Schedule: {…, parts per microsecond, fits, duration of the cost, its parts, tau, its parts,
-- format, whether it is a queue, and optionally how long the request may wait in it}
--
-- A state is the arrival time; its parts if there are several per microsecond; and the lead.
ask[0] = function(member, value, position)
  local _, _, fraction, fits, lasting, lasting_parts, tau, tau_parts, format, _, longest = spread(member)
  local ahead, rest = 0, 0
  if position then
    local arrival, lead
    if fraction == 1 then
      arrival, lead, position = struct_unpack('>I7I1', value, position)
    else
      arrival, rest, lead, position = struct_unpack(format, value, position)
    end
    ahead = arrival - now
    if ahead < 0 then
      ahead, rest = 0, 0
    elseif ahead > tau and is_from_ahead(ahead, lead) then
      from_ahead = true
    end
  end
  local after, after_rest = ahead + lasting, rest + lasting_parts
  if after_rest >= fraction then
    after, after_rest = after + 1, after_rest - fraction
  end
  local over = after > tau or after == tau and after_rest > tau_parts
  local late = longest and (ahead > longest or ahead == longest and rest > 0)
  return position, over or late or not fits, ahead, rest, after, after_rest
end

charge[0] = function(member, found, mode)
  local _, _, fraction, _, _, _, tau, tau_parts, format = spread(member)
  local _, _, ahead, rest, after, after_rest = spread(found, 1, MOST_FOUND)
  if mode == KEEP then
    after, after_rest = ahead, rest
  elseif mode == CLAMP and (after > tau or after == tau and after_rest > tau_parts) then
    after, after_rest = tau, tau_parts
    -- The state exceeds tau already, because of higher limits.
    if ahead > tau or ahead == tau and rest > tau_parts then
      after, after_rest = ahead, rest
    end
  end
  local expires = now + after
  if fraction == 1 then
    return struct_pack('>I7I1', expires, lead_of(after)), expires
  end
  return struct_pack(format, expires, after_rest, lead_of(after)), expires + (after_rest > 0 and 1 or 0)
end
