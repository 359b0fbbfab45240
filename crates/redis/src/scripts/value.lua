-- A value begins with a byte that contains the algorithm ID and two flags. If the first flag is
-- set, the end of a block follows, in 7 bytes. If the second flag is set, a refund ledger follows.
-- The rest of the header and the states follow. A ledger consists of the number of its sums (1
-- byte), the instant until which the ledger is kept, the instant at which the ledger was created,
-- and the sums. Each of the instants and sums takes 7 bytes. The byte with the number of sums also
-- has two flags. CLAMPED marks a ledger that was created when the states were clamped, because a
-- clock that was ahead had written them. CONVERTED marks a ledger that was created when the states
-- were converted to other parameters.
local BLOCKED, HAS_LEDGER, CLAMPED, CONVERTED = 128, 64, 128, 64

-- Returns three results: the end of the block, or nil without a block; the ledger, or '' without a
-- ledger; and the rest of the value, or '' if no units are charged. A value that was not written by
-- this store is returned unchanged.
local function open_value(raw)
  local first, at, block_end, ledger = byte(raw), 2, nil, ''
  if first >= BLOCKED then
    if #raw < 8 then
      return nil, '', raw
    end
    block_end, at = struct_unpack('>I7', raw, at)
    first = first - BLOCKED
  end
  if first >= HAS_LEDGER then
    local behind = at + 15 + 7 * fmod(byte(raw, at) or 0, CONVERTED)
    if behind > #raw + 1 then
      return nil, '', raw
    end
    ledger, at = sub(raw, at, behind - 1), behind
    first = first - HAS_LEDGER
  end
  return block_end, ledger, at <= #raw and string.char(first) .. sub(raw, at) or ''
end

-- Returns the instant until which a refund ledger is kept.
local function ledger_until(ledger)
  return ledger == '' and 0 or (struct_unpack('>I7', ledger, 2))
end

-- Combines a value with its block and its ledger. `close_value` is the inverse of `open_value`.
local function close_value(value, block_end, ledger)
  local first = byte(value)
  if ledger ~= '' then
    first = first + HAS_LEDGER
  end
  if block_end then
    first = first + BLOCKED
    ledger = struct_pack('>I7', block_end) .. ledger
  end
  return string.char(first) .. ledger .. sub(value, 2)
end
