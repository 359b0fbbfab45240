-- Stores overrides, which are documents by id, and lists their changes.
--
-- KEYS[1]  a hash of the documents by id; the field 'complete_since' is a version: the list of
--          removals has every removal after it
-- KEYS[2]  a sorted set of the ids by the version of their last change
-- KEYS[3]  a sorted set of removed ids by the version of their removal
-- ARGV     one of these operations:
--          'put', id, document, maximum number of overrides: returns 1, or 0 if there are too many
--          'drop', id, document: removes the override, unless it has another document; an empty
--          document stands for any; returns 1 if it was removed
--          'changes', version, number: returns the version up to which the reply is complete, 1 if
--          more changes follow, the changed ids each followed by their document, and the removed
--          ids; returns only -1 if the changes since the version are not known
--
-- Versions are milliseconds since 1970 or, if there are several changes in a millisecond, the next
-- numbers. So versions also increase if Redis has lost its data.
local call, verb, id, document = redis.call, ARGV[1], ARGV[2], ARGV[3]
local MAX_REMOVED = 10000

local function newest(key)
  return tonumber(call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
end

local function next_version()
  local time = call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local last = math.max(newest(KEYS[2]), newest(KEYS[3]))
  return string.format('%.0f', math.max(now, last + 1))
end

if verb == 'put' then
  if call('HEXISTS', KEYS[1], id) == 0 then
    if call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then
      return 0
    end
    -- The removals from before the first override are not known.
    call('HSETNX', KEYS[1], 'complete_since', next_version())
  end
  call('HSET', KEYS[1], id, document)
  call('ZADD', KEYS[2], next_version(), id)
  call('ZREM', KEYS[3], id)
  return 1
elseif verb == 'drop' then
  local stored = call('HGET', KEYS[1], id)
  if not stored or document ~= '' and document ~= stored then
    return 0
  end
  local version = next_version()
  call('HDEL', KEYS[1], id)
  call('ZREM', KEYS[2], id)
  call('ZADD', KEYS[3], version, id)
  local surplus = call('ZCARD', KEYS[3]) - MAX_REMOVED
  if surplus > 0 then
    local last = call('ZRANGE', KEYS[3], surplus - 1, surplus - 1, 'WITHSCORES')
    call('ZREMRANGEBYRANK', KEYS[3], 0, surplus - 1)
    call('HSET', KEYS[1], 'complete_since', last[2])
  end
  return 1
end

local version, number = tonumber(ARGV[2]), tonumber(ARGV[3])
local last = math.max(newest(KEYS[2]), newest(KEYS[3]))
local complete_since = tonumber(call('HGET', KEYS[1], 'complete_since') or 0)
if version > last or version > 0 and version < complete_since then
  return { -1 }
end
local function since(key)
  return call('ZRANGEBYSCORE', key, '(' .. ARGV[2], '+inf', 'WITHSCORES', 'LIMIT', 0, number)
end
local changed, removed = since(KEYS[2]), version > 0 and since(KEYS[3]) or {}
-- A list that was cut off is complete up to its last version, and so the reply is, too.
local upto, more = last, 0
for _, list in ipairs({ changed, removed }) do
  if #list == 2 * number then
    upto, more = math.min(upto, tonumber(list[#list])), 1
  end
end
local changes, removals = {}, {}
for at = 1, #changed, 2 do
  if tonumber(changed[at + 1]) <= upto then
    changes[#changes + 1] = changed[at]
    changes[#changes + 1] = call('HGET', KEYS[1], changed[at]) or ''
  end
end
for at = 1, #removed, 2 do
  if tonumber(removed[at + 1]) <= upto then
    removals[#removals + 1] = removed[at]
  end
end
return { upto, more, changes, removals }
