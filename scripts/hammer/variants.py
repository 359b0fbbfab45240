"""The variants of every algorithm, each with its limit in the rules file and the maximum that it
may admit.

Each variant refills `limit` units per `window`. The maximum between two times is that of
docs/algorithms.md, for a key without earlier requests. Times are microseconds on Redis' clock. The
load begins a quarter into a window and lasts 7.5 windows. It therefore ends in the middle of a
window or bucket, where the maximum can be reached.
"""

DAY = 86_400_000_000
TOKYO = 9 * 3_600_000_000  # the offset from UTC, which has no daylight saving time
BUCKETS = 5
WINDOWS = 7.5  # the duration of the load, in windows


class Variant:
    """A rule. `maximum(began, ended)` returns the most units that it may admit between two
    times."""

    def __init__(self, name, limits, maximum, algorithm=None):
        self.name, self.maximum = name, maximum
        self.rule = {"name": name, "when": {"variant": name}, "key": ["user"], "limits": limits}
        if algorithm:
            self.rule["algorithm"] = algorithm


def variants(limit, window):
    """Returns all variants. The window is in microseconds and must be a multiple of 10 ms."""
    rate = f"{limit}/{window // 1_000}ms"
    span = f"{window // 1_000}ms"
    count = {"algorithm": "sliding_window_counter", "limit": limit, "window": span}
    fixed = {"algorithm": "fixed_window", "limit": limit, "window": span}
    days, burst, part = 5 * limit, limit // 2, 2 * limit // 5
    return [
        Variant(
            "gcra",
            [{"algorithm": "gcra", "rate": rate, "burst": burst}],
            gcra(burst + 1, limit, window),
        ),
        Variant(
            "bucket",
            [{"algorithm": "token_bucket", "capacity": limit, "refill": rate}],
            gcra(limit, limit, window),
        ),
        Variant(
            "interval",
            [
                {
                    "algorithm": "token_bucket",
                    "capacity": 2 * limit,
                    "refill": rate,
                    "refill_mode": "interval",
                }
            ],
            lambda began, ended: 2 * limit + limit * ((ended - began) // window),
        ),
        Variant(
            "leaky",
            [{"algorithm": "leaky_bucket", "capacity": limit, "leak": rate}],
            gcra(limit, limit, window),
        ),
        # One request is in progress, and `capacity` requests wait.
        Variant(
            "queue",
            [{"algorithm": "leaky_bucket", "capacity": limit, "leak": rate, "queue": True}],
            gcra(limit + 1, limit, window),
        ),
        Variant("epoch", [fixed], lambda began, ended: limit * touched(began, ended, window)),
        Variant(
            "first",
            [{**fixed, "anchor": "first_request"}],
            lambda began, ended: limit * ((ended - began) // window + 1),
        ),
        Variant(
            "calendar",
            [
                {
                    "algorithm": "fixed_window",
                    "limit": days,
                    "anchor": {"calendar": "day", "zone": "Asia/Tokyo"},
                }
            ],
            lambda began, ended: days * touched(began + TOKYO, ended + TOKYO, DAY),
        ),
        Variant(
            "log",
            [f"{part}/{window // 10_000}ms", rate, f"{2 * limit}/{3 * window // 1_000}ms"],
            log([(part, window // 10), (limit, window), (2 * limit, 3 * window)]),
            "sliding_window_log",
        ),
        Variant(
            "strict",
            [{**count, "buckets": BUCKETS}],
            buckets(limit, window // BUCKETS, BUCKETS + 1),
        ),
        Variant(
            "loose",
            [{**count, "buckets": BUCKETS, "strict": False}],
            buckets(limit, window // BUCKETS, BUCKETS),
        ),
        Variant("weighted", [count], weighted(limit, window)),
    ]


def touched(began, ended, window):
    """Returns the number of aligned windows that overlap the interval."""
    return ended // window - began // window + 1


def gcra(capacity, limit, window):
    return lambda began, ended: capacity + limit * (ended - began) // window


def buckets(limit, width, summed):
    """The maximum if `limit` applies to any `summed` buckets in a row, of `width` microseconds."""
    return lambda began, ended: limit * -(-touched(began, ended, width) // summed)


def weighted(limit, window):
    """The whole limit in the first window, and one unit less in each window after a full one. The
    last unit would be admitted only at the very end of the window."""

    def maximum(began, ended):
        before = ended // window - began // window
        if not before:
            return limit
        previous = limit if before == 1 else limit - 1
        left = window - ended % window
        return limit + (limit - 1) * (before - 1) + limit - -(-previous * left // window)

    return maximum


def log(windows):
    """At most `limit` units in every half-open interval of length `window`, for each pair of limit
    and window in `windows`. The shortest window comes first."""

    def maximum(windows, length):
        """The maximum in a closed interval of this length."""
        *shorter, (limit, window) = windows
        if not shorter:
            return limit * (length // window + 1)
        whole = min(limit, maximum(shorter, window - 1))
        return whole * (length // window) + min(limit, maximum(shorter, length % window))

    return lambda began, ended: maximum(windows, ended - began)
