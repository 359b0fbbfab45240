-- Replaces values if none of them has changed since it was read.
--
-- KEYS     the keys
-- ARGV     for each key the value that was read, the new value, and its time to live in
--          milliseconds: 0 for none, -1 to leave the key unchanged
--
-- Returns 1, or 0 if a value has changed.
for i = 1, #KEYS do
  if (redis.call('GET', KEYS[i]) or '') ~= ARGV[3 * i - 2] then
    return 0
  end
end
for i = 1, #KEYS do
  local value, millis = ARGV[3 * i - 1], ARGV[3 * i]
  if millis == '-1' then
    -- Leave the key unchanged.
  elseif value == '' then
    redis.call('DEL', KEYS[i])
  elseif millis == '0' then
    redis.call('SET', KEYS[i], value)
  else
    redis.call('PSETEX', KEYS[i], millis, value)
  end
end
return 1
