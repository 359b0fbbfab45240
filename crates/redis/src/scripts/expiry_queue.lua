-- The expiry queue of outstanding reservations. If the server that made a reservation has stopped,
-- any other server finds the expired reservation in the queue, and ends it.
--
-- KEYS[1]  a hash by id. Each value consists of the instant, in milliseconds, from which on any
--          server may end the reservation (7 bytes), and the reservation
-- KEYS[2]  a sorted set of the ids, scored by the instant, in milliseconds, from which on any
--          server can claim the reservation
-- ARGV     the instant in microseconds, empty for the server's own clock; and one of these
--          operations:
--          'write', maximum number of reservations, time in milliseconds by which a reservation is
--          kept beyond its score, number of ids, ids, and reservations: removes the ids, and then
--          stores the reservations. A reservation consists of its id, the number of milliseconds
--          until any server may end it, and its value. Returns the number of reservations that were
--          not stored because there are too many.
--          'claim', maximum number, maximum number of bytes, milliseconds: returns reservations
--          that any server may end. For each, returns its id, the number of milliseconds for which
--          any server may have ended it, and its value. Other servers do not receive them for the
--          given number of milliseconds. If the caller fails to end them, another server can then
--          claim them.
--          'release', ids: other servers can claim these reservations immediately, after all those
--          that can be claimed now.
local DUE, DUE_BYTES = '>I7', 7
local call, reservations, due = redis.call, KEYS[1], KEYS[2]
local now = tonumber(ARGV[1])
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
now = math.floor(now / 1000)

if ARGV[2] == 'write' then
  local most, slack, ended = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
  for at = 6, 5 + ended do
    call('HDEL', reservations, ARGV[at])
    call('ZREM', due, ARGV[at])
  end
  local first, longest, refused = 6 + ended, 0, 0
  for at = first, #ARGV, 3 do
    local id, delay, value = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
    if call('ZCARD', due) < most or call('ZSCORE', due, id) then
      call('HSET', reservations, id, struct.pack(DUE, now + delay) .. value)
      call('ZADD', due, now + delay, id)
      longest = math.max(longest, delay)
    else
      refused = refused + 1
    end
  end
  for _, key in ipairs(first < #ARGV and KEYS or {}) do
    -- Other reservations may need a longer time to live.
    if call('PTTL', key) < longest + slack then
      call('PEXPIRE', key, longest + slack)
    end
  end
  return refused
end

if ARGV[2] == 'release' then
  for at = 3, #ARGV do
    call('ZADD', due, 'XX', now, ARGV[at])
  end
  return 0
end

local most_bytes, lease = tonumber(ARGV[4]), tonumber(ARGV[5])
local claimed, bytes = {}, 0
for _, id in ipairs(call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, ARGV[3])) do
  local value = call('HGET', reservations, id)
  if value then
    bytes = bytes + #value - DUE_BYTES
    if #claimed > 0 and bytes > most_bytes then
      break
    end
    call('ZADD', due, now + lease, id)
    claimed[#claimed + 1] = id
    claimed[#claimed + 1] = string.format('%.0f', now - struct.unpack(DUE, value))
    claimed[#claimed + 1] = string.sub(value, DUE_BYTES + 1)
  else
    call('ZREM', due, id)
  end
end
return claimed
