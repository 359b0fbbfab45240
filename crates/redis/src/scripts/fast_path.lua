-- Fast path for one key whose limits have states of a fixed size, and do not count denied requests.
-- It is much cheaper than check.lua, because it is assembled for a sequence of kernels: the numbers
-- and the states of all members are read, and written, by one call each. The names in capitals are
-- replaced, and the code of each member is inserted. In that code the number of the member takes
-- the place of N in names such as `cost_N`.
--
-- KEYS[1]  the key
-- ARGV[1]  the header of its value; and the numbers of each member
-- ARGV[2]  the instant; absent for the server's own clock
--
-- Returns the instant in 7 bytes and the value before. Returns {value, instant}, and charges
-- nothing, if the value has another header (the key is blocked, or is stored under other
-- parameters), or if a clock that was ahead has written it. A ledger stays in the value for as long
-- as it is kept.
local call, struct_pack, struct_unpack = redis.call, struct.pack, struct.unpack
local key, now, slack = KEYS[1], tonumber(ARGV[2]), 86400000
local head, NUMBERS = struct_unpack('NUMBERS_FORMAT', ARGV[1])
if not now then
  local time = call('TIME')
  now, slack = time[1] * 1000000 + time[2], 2
end
-- How long a clock may have been ahead (lead.lua).
local JUMP = 10000000
local raw, front, kept = call('GET', key), head, 0
local STATES = ZEROS
if raw then
  local value, found = raw, nil
  if #value ~= VALUE_BYTES then
    -- (ledger.lua)
    value, front, kept = open_ledger(raw, head)
    if not value or #value ~= VALUE_BYTES then
      return {raw, now}
    end
    if kept <= now then
      front = head
    end
  end
  found, STATES = struct_unpack('VALUE_FORMAT', value)
  if found ~= head then
    return {raw, now}
  end
end
local denies, expires = false, kept
-- (the members come here)
if not denies then
  local millis = math.floor((expires - now) / 1000) + slack
  call('PSETEX', key, millis, struct_pack('WRITTEN_FORMAT', front, WRITTEN))
end
return struct_pack('>I7c0', now, raw or '')
