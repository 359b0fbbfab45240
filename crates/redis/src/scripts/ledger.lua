-- Returns three results: the value without its refund ledger (value.lua), the value's header with
-- the ledger, and the instant until which the ledger is kept. Returns nil if the value has no
-- ledger, a header other than `head`, or a block.
local function open_ledger(value, head)
  local first, sums = string.byte(value, 1, 2)
  local behind = 17 + 7 * ((sums or 0) % 64)
  if (first or 0) - 64 ~= string.byte(head) or behind + #head - 2 > #value then
    return nil
  end
  local front = string.sub(value, 1, behind + #head - 2)
  local state = string.sub(head, 1, 1) .. string.sub(value, behind)
  if string.sub(state, 1, #head) ~= head then
    return nil
  end
  return state, front, (struct.unpack('>I7', value, 3))
end
