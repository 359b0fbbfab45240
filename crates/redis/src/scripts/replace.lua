-- Writes values over those that were read, if all of them still stand.
--
-- KEYS  the keys
-- ARGV  for each key the value that was read, the new one, and how many milliseconds that lasts: 0 for ever, -1 to
--       leave the key as it is
--
-- Answers 1, or 0 if a value was another.
for i = 1, #KEYS do
  if (redis.call('GET', KEYS[i]) or '') ~= ARGV[3 * i - 2] then
    return 0
  end
end
for i = 1, #KEYS do
  local value, millis = ARGV[3 * i - 1], ARGV[3 * i]
  if millis == '-1' then
    -- Left as it is.
  elseif value == '' then
    redis.call('DEL', KEYS[i])
  elseif millis == '0' then
    redis.call('SET', KEYS[i], value)
  else
    redis.call('PSETEX', KEYS[i], millis, value)
  end
end
return 1
