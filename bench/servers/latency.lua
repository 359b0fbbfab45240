-- Prints the result of a run in one line: requests, failures, and the latency in microseconds at
-- the 50th and the 99th percentile. (`wrk --latency` rounds to hundredths of a millisecond.)

function done(summary, latency)
   local errors = summary.errors
   local failures = errors.connect + errors.read + errors.write + errors.status + errors.timeout
   local percentiles = string.format("%d %d", latency:percentile(50), latency:percentile(99))
   io.write(string.format("RESULT %d %d %s\n", summary.requests, failures, percentiles))
end
