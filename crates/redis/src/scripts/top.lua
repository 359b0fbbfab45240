-- Publishes and reads time slices of the top-talker lists. ARGV[1] is the operation:
--   join  KEYS[1] is a sorted set of the ids of the servers, scored by the time of their last
--         publication. Adds the id ARGV[2], and returns nothing.
--   list  The same key. Returns the ids.
--   put   KEYS[1] is the hash of one server. Sets the fields ARGV[3], ARGV[5] … to the values that
--         follow them; the hash expires after ARGV[2] milliseconds.
--   get   The same key. Returns the values of the fields ARGV[2] …
-- For `join` and `list`, ARGV[3] is the number of milliseconds after which an id is removed, and
-- ARGV[4] the maximum number of ids.
local verb = ARGV[1]
if verb == 'put' then
  for at = 3, #ARGV, 2 do
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
  end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
if verb == 'get' then
  return redis.call('HMGET', KEYS[1], unpack(ARGV, 2))
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = tonumber(ARGV[3])
if verb == 'join' then
  redis.call('ZADD', KEYS[1], now, ARGV[2])
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - expiry)
  -- A publication in the future comes from the clock of a former primary, and would not expire.
  redis.call('ZREMRANGEBYSCORE', KEYS[1], now + expiry, '+inf')
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[4])
  redis.call('PEXPIRE', KEYS[1], expiry)
  return 1
end
return redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', now - expiry, 'LIMIT', 0, ARGV[4])
