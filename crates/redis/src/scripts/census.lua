-- Counts the servers that share this Redis. KEYS[1] is a sorted set of their ids by their last heartbeats.
-- ARGV: the id of the server that asks, and after how many milliseconds without a heartbeat a server is gone.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - expiry)
-- Heartbeats from the future were written by the clock of an earlier primary, and would not expire.
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + expiry, '+inf')
redis.call('PEXPIRE', KEYS[1], expiry)
return redis.call('ZCARD', KEYS[1])
