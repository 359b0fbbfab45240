-- Publishes and reads the recent denials of all servers. KEYS[1] is a hash used as a ring buffer:
-- denial number N is in the field N % ARGV[2]. The field `next` is the number of the next denial,
-- and the field `lost` counts unpublished denials. ARGV[1] is the operation:
--   put   Adds the denials ARGV[5] …, oldest first, and ARGV[4] to `lost`. The hash expires after
--         ARGV[3] milliseconds.
--   get   Returns the number of the next denial, the number of lost denials, and at most ARGV[4]
--         denials with numbers below ARGV[3], newest first. If ARGV[3] is an empty string, starts
--         with the newest denial. Each denial is preceded by its number and a space.
local size = tonumber(ARGV[2])
local head = redis.call('HMGET', KEYS[1], 'next', 'lost')
local first, lost = tonumber(head[1] or 0), tonumber(head[2] or 0)
if ARGV[1] == 'put' then
  for at = 5, #ARGV do
    redis.call('HSET', KEYS[1], first % size, string.format('%d ', first) .. ARGV[at])
    first = first + 1
  end
  redis.call('HSET', KEYS[1], 'next', first, 'lost', lost + ARGV[4])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return 1
end
local before = math.min(first, tonumber(ARGV[3]) or first)
local oldest = math.max(0, first - size, before - ARGV[4])
local fields = {}
for number = before - 1, oldest, -1 do
  fields[#fields + 1] = number % size
end
local found = #fields > 0 and redis.call('HMGET', KEYS[1], unpack(fields)) or {}
-- A nil would truncate the reply, so a missing field becomes an empty string.
for at = 1, #fields do
  found[at] = found[at] or ''
end
return { first, lost, found }
