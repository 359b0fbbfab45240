-- Fast path for one key whose limits have states of a fixed size, and do not count denied requests.
-- The script is much cheaper than check.lua, because it is assembled for a specific sequence of
-- algorithms. One call unpacks the parameters of all members, a second call unpacks all states, and
-- a third call packs all states. The names in capitals are replaced, and the code of each member is
-- inserted. In the code of a member, the member's index replaces N in names such as `cost_N`.
--
-- KEYS[1]  the key
-- ARGV[1]  the header of its value; and the parameters of each member
-- ARGV[2]  the instant; absent for the server's own clock
--
-- Returns the instant in 7 bytes, followed by the value before the charge. Charges nothing and
-- returns {value, instant} if the value has another header (because the key is blocked, or was
-- stored under other parameters), or if a clock that was ahead wrote the value. A refund ledger
-- stays in the value until the ledger expires.
local call, struct_pack, struct_unpack = redis.call, struct.pack, struct.unpack
local key, now, slack = KEYS[1], tonumber(ARGV[2]), 86400000
local head, NUMBERS = struct_unpack('NUMBERS_FORMAT', ARGV[1])
if not now then
  local time = call('TIME')
  now, slack = time[1] * 1000000 + time[2], 2
end
-- The time by which a state may exceed its lead (lead.lua).
local JUMP = CLOCK_JUMP
local raw, front, ledger_until = call('GET', key), head, 0
local STATES = ZEROS
if raw then
  local value, stored_head = raw, nil
  if #value ~= VALUE_BYTES then
    -- (ledger.lua)
    value, front, ledger_until = open_ledger(raw, head)
    if not value or #value ~= VALUE_BYTES then
      return {raw, now}
    end
    if ledger_until <= now then
      front = head
    end
  end
  stored_head, STATES = struct_unpack('VALUE_FORMAT', value)
  if stored_head ~= head then
    return {raw, now}
  end
end
local denies, expires = false, ledger_until
-- (the members come here)
if not denies then
  local millis = math.floor((expires - now) / 1000) + slack
  call('PSETEX', key, millis, struct_pack('WRITTEN_FORMAT', front, WRITTEN))
end
return struct_pack('>I7c0', now, raw or '')
