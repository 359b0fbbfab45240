-- open_numbers[kernel](program, at) returns the named parameters of the member at the position `at`
-- of `program`, and the position after them. `program.lua` describes programs and members.
local open_numbers = {}

open_numbers[GCRA] = function(program, at)
  local lasting, tau, fraction, _, queue, _, behind = struct_unpack(GCRA_NUMBERS, program, at)
  local member = {lasting = lasting, lasting_parts = 0, fraction = fraction, is_queue = queue == 1}
  member.format, member.mark_bytes = '>I7I1', 8
  if fraction > 1 then
    local bytes
    member.lasting_parts, _, bytes, behind = struct_unpack(GCRA_PARTS, program, behind)
    member.format, member.mark_bytes = '>I7I' .. bytes .. 'I1', 8 + bytes
  end
  return member, behind
end

open_numbers[INTERVAL] = function(program, at)
  local refill, every, _, cost, behind = struct_unpack(INTERVAL_NUMBERS, program, at)
  return {refill = refill, every = every, cost = cost}, behind
end

open_numbers[WINDOW] = function(program, at)
  local _, cost, _, grid, _, behind = struct_unpack(WINDOW_NUMBERS, program, at)
  if grid ~= EPOCH and grid ~= FIRST_REQUEST then
    _, _, _, behind = struct_unpack(CALENDAR_ENDS, program, behind)
  end
  return {cost = cost}, behind
end

open_numbers[LOG] = function(program, at)
  local windows, cost, behind = struct_unpack(LOG_NUMBERS, program, at)
  local largest, limit, _ = 0, nil, nil
  for _ = 1, windows do
    limit, _, behind = struct_unpack(LOG_WINDOW, program, behind)
    largest = max(largest, limit)
  end
  return {cost = cost, limit = largest}, behind
end
open_numbers[LEASE] = open_numbers[LOG]

open_numbers[BUCKETS] = function(program, at)
  local _, width, _, cost, behind = struct_unpack(BUCKETS_NUMBERS, program, at)
  return {width = width, cost = cost}, behind
end

open_numbers[WEIGHTED] = function(program, at)
  local _, _, cost, behind = struct_unpack(WEIGHTED_NUMBERS, program, at)
  return {cost = cost}, behind
end

-- Parses a program into a table with the header of the value, the shadow mode of the rule, the
-- members, and the algorithms of the members (refund.lua).
local function open_program(program)
  local is_shadow, _, head_bytes, at = struct_unpack(PROGRAM, program)
  local head, members, kernels = sub(program, at, at + head_bytes - 1), {}, 0
  at = at + head_bytes
  while at <= #program do
    local kernel, denials = byte(program, at, at + 1)
    local member
    member, at = open_numbers[kernel](program, at + 2)
    member.kernel, member.denials = kernel, denials
    members[#members + 1] = member
    kernels = 8 * kernels + kernel
  end
  return {head = head, is_shadow = is_shadow == 1, members = members, kernels = kernels}
end
