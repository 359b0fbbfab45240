-- A program has the numbers of a charge's limits: whether the rule is in shadow mode and whether a
-- member counts denied requests, a byte each; the length of the header of its value, 2 bytes, and
-- that header; and the members. A member is its kernel, a byte; how it treats a denied request, a
-- byte: 0, it does not count it; COUNTED, it fills the state completely; IN_FULL, it counts the
-- request in full if it denies it itself; and the numbers of its kernel:
--
--   schedule  duration of the cost, tau, parts per microsecond, whether the cost ever fits, whether
--             it is a queue, how long the request may wait in it; if there are several parts per
--             microsecond, those of the duration and of tau, and the bytes that hold them
--   interval  refill, every, capacity, cost
--   window    limit, cost, the most that is counted, grid, span. A grid is of windows since the
--             epoch (EPOCH) or from the first request (FIRST_REQUEST), and their length; or of a
--             calendar, and the start of a window. The ends of this window and of the two after it
--             follow
--   log,      number of windows, cost; limit and span of each
--   lease
--   buckets   limit, width, how many are summed, cost
--   weighted  limit, window, cost
local SCHEDULE, INTERVAL, WINDOW, LOG, BUCKETS, WEIGHTED, LEASE = 0, 1, 2, 3, 4, 5, 6
local PROGRAM = '>I1I1I2'
local COUNTED, IN_FULL, EPOCH, FIRST_REQUEST = 1, 2, 0, 1
local SCHEDULE_NUMBERS, SCHEDULE_PARTS = '>I7I7I7I1I1I7', '>I7I7I1'
local INTERVAL_NUMBERS, WINDOW_NUMBERS, CALENDAR_ENDS = '>I7I7I7I7', '>I7I7I7I1I7', '>I7I7I7'
local LOG_NUMBERS, LOG_WINDOW = '>I1I7', '>I7I7'
local BUCKETS_NUMBERS, WEIGHTED_NUMBERS = '>I7I7I7I7', '>I7I7I7'
