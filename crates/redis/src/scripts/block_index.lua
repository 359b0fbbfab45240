-- Maintains the index that lists all blocks. A block is enforced by the value of its key, not by
-- this index.
--
-- KEYS[1]  the index
-- ARGV     the instant, empty for the server's own clock; the time in milliseconds by which the
--          index outlives its last block; and one of these operations:
--          'put', key, duration in microseconds or 0 for no end, note, maximum number of blocks:
--          returns the end of the block, 0 for no end, or -1 if there are too many blocks
--          'drop', key
--          'get', key: returns the entry
--          'lifted', keys: returns the keys without an active block
--          'time': returns the instant
--          'scan', cursor: returns the next cursor, and the keys, each followed by its entry
--          'sweep', cursor: removes expired blocks from one page of the index; returns the next
--          cursor
--
-- An entry is the end of the block in 7 bytes, followed by the note. The note is the reason for the
-- block. If the block belongs to a rule, the note also contains the rule's name and the names of
-- its key entries, each after a byte 255.
local call, verb, key = redis.call, ARGV[3], ARGV[4]
local now, slack = tonumber(ARGV[1]), tonumber(ARGV[2])
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local function ended(entry)
  local till = struct.unpack('>I7', entry)
  return till > 0 and till <= now
end

if verb == 'drop' then
  return call('HDEL', KEYS[1], key)
elseif verb == 'get' then
  return call('HGET', KEYS[1], key) or ''
elseif verb == 'lifted' then
  local lifted = {}
  local entries = call('HMGET', KEYS[1], unpack(ARGV, 4))
  for i = 1, #entries do
    if not entries[i] or ended(entries[i]) then
      lifted[#lifted + 1] = ARGV[3 + i]
    end
  end
  return lifted
elseif verb == 'time' then
  return now
elseif verb == 'scan' then
  return call('HSCAN', KEYS[1], key, 'COUNT', 1000)
elseif verb == 'sweep' then
  local page = call('HSCAN', KEYS[1], key, 'COUNT', 1000)
  local next, entries = page[1], page[2]
  for i = 1, #entries, 2 do
    if ended(entries[i + 1]) then
      call('HDEL', KEYS[1], entries[i])
    end
  end
  return next
end

local most = tonumber(ARGV[7])
if call('HEXISTS', KEYS[1], key) == 0 and call('HLEN', KEYS[1]) >= most then
  return -1
end
local span = tonumber(ARGV[5])
local till = span > 0 and now + span or 0
local ttl = call('PTTL', KEYS[1])
call('HSET', KEYS[1], key, struct.pack('>I7', till) .. ARGV[6])
local millis = math.floor(span / 1000) + slack
if till == 0 then
  call('PERSIST', KEYS[1])
elseif ttl == -2 or ttl > 0 and ttl < millis then
  call('PEXPIRE', KEYS[1], millis)
end
return till
