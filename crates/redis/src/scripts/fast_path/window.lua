if ends_N <= now then
  count_N = 0
  ends_N = now + span_N
  if is_epoch_N == 1 then
    ends_N = ends_N - math.fmod(now, span_N)
  end
elseif ends_N - span_N > now + JUMP then
  return {raw, now}
end
count_N = count_N + cost_N
denies = denies or count_N > limit_N
if ends_N > expires then
  expires = ends_N
end
