-- Counts the servers that share this Redis. KEYS[1] is a sorted set of their ids, scored by the
-- time of their last heartbeat. ARGV is the id of this server, and the number of milliseconds
-- without a heartbeat after which a server is removed.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - expiry)
-- A heartbeat in the future comes from the clock of a former primary, and would not expire.
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + expiry, '+inf')
redis.call('PEXPIRE', KEYS[1], expiry)
return redis.call('ZCARD', KEYS[1])
