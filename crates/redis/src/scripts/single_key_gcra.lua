-- Fast path for one key with one GCRA limit. The limit does not count denied requests, and its unit
-- is an integer number of microseconds.
--
-- KEYS[1]  the key
-- ARGV[1]  the header of its value, 4 bytes; the duration of the cost; the maximum time by which
--          the arrival time may be ahead of the clock; the lead of a key that is ahead by that
--          maximum
-- ARGV[2]  the instant; absent for the server's own clock
--
-- Returns how far the arrival time was ahead of the clock before the charge. Charges nothing and
-- returns {value, instant} if the value has another header (because the key is blocked, or was
-- stored under other parameters), or if a clock that was ahead wrote the value. A refund ledger
-- stays in the value until the ledger expires.
local call, key, now, slack = redis.call, KEYS[1], tonumber(ARGV[2]), 86400000
-- All fields are in one argument, because parsing several arguments would cost Redis more.
local head, lasting, tau, lead = struct.unpack('>c4I7I7I1', ARGV[1])
if not now then
  local time = call('TIME')
  now, slack = time[1] * 1000000 + time[2], 2
end
local ahead, stored_lead, front, ledger_until = 0, nil, nil, nil
local value = call('GET', key)
if value then
  local state, stored_head, arrival = value, nil, nil
  if #value ~= 12 then
    -- (ledger.lua)
    state, front, ledger_until = open_ledger(value, head)
    if not state or #state ~= 12 then
      return {value, now}
    end
  end
  stored_head, arrival, stored_lead = struct.unpack('>c4I7I1', state)
  if stored_head ~= head then
    return {value, now}
  end
  ahead = arrival - now
  if ahead < 0 then
    ahead = 0
  end
end
local after = ahead + lasting
if after <= tau then
  if front and ledger_until > now then
    local written = front .. struct.pack('>I7I1', now + after, lead)
    call('PSETEX', key, math.floor(math.max(after, ledger_until - now) / 1000) + slack, written)
  else
    local state = struct.pack('>c4I7I1', head, now + after, lead)
    call('PSETEX', key, math.floor(after / 1000) + slack, state)
  end
elseif ahead > tau then
  -- (lead.lua)
  if is_from_ahead(ahead, stored_lead) then
    return {value, now}
  end
end
return ahead
