-- Stores overrides, which are documents by id, and lists their changes.
--
-- KEYS[1]  a hash of the documents by id; the field 'complete_since' is the version after which the
--          list of removals is complete
-- KEYS[2]  a sorted set of the ids by the version of their last change
-- KEYS[3]  a sorted set of removed ids by the version of their removal
-- KEYS[4]  a sorted set of the ids of overrides with an end, by their end in milliseconds
-- KEYS[5]  a sorted set of the latest versions
-- ARGV     one of these operations:
--          'put', id, document, end or an empty string, maximum number of overrides: returns the
--          document of the replaced override, or an empty string; or 0 if there are too many
--          'drop', id, number of removals to keep: returns the document of the removed override,
--          or an empty string
--          'sweep', milliseconds since 1970, maximum, number of removals to keep: removes at most
--          the maximum number of expired overrides, and returns how many were removed
--          'changes', version, maximum, base: returns the version up to which the reply is
--          complete; 1 if more changes follow; the changed ids, each followed by its document; the
--          removed ids; and the newest version. Returns only -1 if the changes since the base are
--          not known. Version 0 requests all overrides. The base is the version since which the
--          caller has seen every removal: the version itself or, in a read that begins at 0, the
--          newest version at its start
--
-- Versions are microseconds since 1970, or the next higher numbers if there are several changes in
-- one microsecond. Therefore versions also increase if Redis has lost its data.
--
-- After a failover, the promoted replica may lack the last changes, and later changes get newer
-- versions than the lost changes. A caller has seen a lost change if the list of the latest
-- versions does not contain the caller's version. A caller that has seen a lost change reads all
-- overrides again.
local call, verb, id = redis.call, ARGV[1], ARGV[2]

-- The number of versions to keep. A caller that has missed more changes reads all overrides again.
local VERSIONS = 100000

local function newest(key)
  return tonumber(call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
end

local function newest_version()
  return math.max(newest(KEYS[2]), newest(KEYS[3]))
end

local function next_version()
  local time = call('TIME')
  local now = time[1] * 1000000 + time[2]
  return string.format('%.0f', math.max(now, newest_version() + 1))
end

local function record(version)
  call('ZADD', KEYS[5], version, version)
  call('ZREMRANGEBYRANK', KEYS[5], 0, -VERSIONS - 1)
end

local function remove(removed, most)
  local version = next_version()
  record(version)
  call('HDEL', KEYS[1], removed)
  call('ZREM', KEYS[2], removed)
  call('ZREM', KEYS[4], removed)
  call('ZADD', KEYS[3], version, removed)
  local surplus = call('ZCARD', KEYS[3]) - most
  if surplus > 0 then
    local last = call('ZRANGE', KEYS[3], surplus - 1, surplus - 1, 'WITHSCORES')
    call('ZREMRANGEBYRANK', KEYS[3], 0, surplus - 1)
    call('HSET', KEYS[1], 'complete_since', last[2])
  end
end

if verb == 'put' then
  local document, ends = ARGV[3], ARGV[4]
  local replaced = call('HGET', KEYS[1], id)
  if not replaced then
    if call('ZCARD', KEYS[2]) >= tonumber(ARGV[5]) then
      return 0
    end
    -- The set does not contain the removals before the first override.
    call('HSETNX', KEYS[1], 'complete_since', next_version())
  end
  call('HSET', KEYS[1], id, document)
  local version = next_version()
  record(version)
  call('ZADD', KEYS[2], version, id)
  call('ZREM', KEYS[3], id)
  if ends == '' then
    call('ZREM', KEYS[4], id)
  else
    call('ZADD', KEYS[4], ends, id)
  end
  return replaced or ''
elseif verb == 'drop' then
  local document = call('HGET', KEYS[1], id)
  if not document then
    return ''
  end
  remove(id, tonumber(ARGV[3]))
  return document
elseif verb == 'sweep' then
  local ended = call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
  for _, removed in ipairs(ended) do
    remove(removed, tonumber(ARGV[4]))
  end
  return #ended
end

local version, number, base = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local last = newest_version()
local complete_since = tonumber(call('HGET', KEYS[1], 'complete_since') or 0)
local is_known = base == 0 or base >= complete_since and call('ZSCORE', KEYS[5], ARGV[4])
if math.max(version, base) > last or not is_known then
  return { -1 }
end
if version == 0 and last > 0 then
  -- A server of an earlier version may have made the last change.
  record(string.format('%.0f', last))
end
local function since(key)
  return call('ZRANGEBYSCORE', key, '(' .. ARGV[2], '+inf', 'WITHSCORES', 'LIMIT', 0, number)
end
local changed, removed = since(KEYS[2]), version > 0 and since(KEYS[3]) or {}
-- A truncated list is complete only up to its last version, so the reply is complete only up to
-- that version, too.
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
return { upto, more, changes, removals, last }
