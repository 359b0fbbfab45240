-- A program contains the parameters of a charge's limits. It begins with 1 byte, whether the rule
-- is in shadow mode; and 1 byte, whether a member counts denied requests. The length of the value's
-- header, in 2 bytes, the header itself, and the members follow. A member consists of 1 byte, the
-- ID of its algorithm; 1 byte, how it treats a denied request; and its parameters. A member can
-- ignore a denied request (0), fill its state completely (COUNTED), or count in full the requests
-- that the member itself denies (IN_FULL). The parameters of each algorithm:
--
--   gcra      duration of the cost, tau, parts per microsecond, whether the cost ever fits, whether
--             the limit is a queue, how long the request may wait in the queue; if there are
--             several parts per microsecond, the parts of the duration and of tau, and the number
--             of bytes that hold parts
--   interval  refill, every, capacity, cost
--   window    limit, cost, the maximum count, grid, span. The windows of a grid are counted from
--             the epoch (EPOCH) or from the first request (FIRST_REQUEST), and span is their
--             length; or they are calendar windows, and span is the start of a window. The ends of
--             that window and of the two windows after it follow
--   log,      number of windows, cost; limit and span of each
--   lease
--   buckets   limit, width, number of summed buckets, cost
--   weighted  limit, window, cost
local GCRA, INTERVAL, WINDOW, LOG, BUCKETS, WEIGHTED, LEASE = 0, 1, 2, 3, 4, 5, 6
local PROGRAM = '>I1I1I2'
local COUNTED, IN_FULL, EPOCH, FIRST_REQUEST = 1, 2, 0, 1
local GCRA_NUMBERS, GCRA_PARTS = '>I7I7I7I1I1I7', '>I7I7I1'
local INTERVAL_NUMBERS, WINDOW_NUMBERS, CALENDAR_ENDS = '>I7I7I7I7', '>I7I7I7I1I7', '>I7I7I7'
local LOG_NUMBERS, LOG_WINDOW = '>I1I7', '>I7I7'
local BUCKETS_NUMBERS, WEIGHTED_NUMBERS = '>I7I7I7I7', '>I7I7I7'
