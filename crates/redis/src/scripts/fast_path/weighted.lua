local into_N = math.fmod(now, window_N)
local newest_N = (now - into_N) / window_N
if newest_N > index_N then
  previous_N = newest_N == index_N + 1 and current_N or 0
  index_N, current_N = newest_N, 0
elseif newest_N < index_N then
  if index_N * window_N > now + JUMP then
    return {raw, now}
  end
  into_N = 0
end
current_N = current_N + cost_N
if current_N > limit_N then
  denies = true
elseif previous_N > 0 then
  local previous, left, free, window = previous_N, window_N - into_N, limit_N - current_N, window_N
  -- (weight.lua)
  denies = denies or exceeds
end
if (index_N + 2) * window_N > expires then
  expires = (index_N + 2) * window_N
end
