"""Every face of every kernel: how its limit is written, and the most that it may admit between two instants.

`LIMIT` units come back in each `WINDOW`, however they do. The bounds are those of docs/algorithms.md, for a key that nobody has
asked about before; instants are microseconds on the clock of Redis. What hammers a key for seven and a half windows,
beginning a quarter into one, ends in the midst of whatever is cut into pieces, and so can be expected to reach them.
"""

DAY = 86_400_000_000
TOKYO = 9 * 3_600_000_000  # hours before UTC, all the year
BUCKETS = 5
WINDOWS = 7.5  # so many of them are hammered


class Face:
    """`limits` as the rules file writes them; `most(began, ended)`."""

    def __init__(self, name, limits, most, algorithm=None):
        self.name, self.most = name, most
        self.rule = {"name": name, "when": {"face": name}, "key": ["user"], "limits": limits}
        if algorithm:
            self.rule["algorithm"] = algorithm


def faces(limit, window):
    """All of them, for a limit and a window of so many microseconds, a multiple of 10 ms."""
    rate = f"{limit}/{window // 1_000}ms"
    span = f"{window // 1_000}ms"
    count = {"algorithm": "sliding_window_counter", "limit": limit, "window": span}
    fixed = {"algorithm": "fixed_window", "limit": limit, "window": span}
    days, burst, part = 5 * limit, limit // 2, 2 * limit // 5
    return [
        Face("gcra", [{"algorithm": "gcra", "rate": rate, "burst": burst}], schedule(burst + 1, limit, window)),
        Face("bucket", [{"algorithm": "token_bucket", "capacity": limit, "refill": rate}], schedule(limit, limit, window)),
        Face("interval", [{"algorithm": "token_bucket", "capacity": 2 * limit, "refill": rate, "refill_mode": "interval"}],
             lambda began, ended: 2 * limit + limit * ((ended - began) // window)),
        Face("leaky", [{"algorithm": "leaky_bucket", "capacity": limit, "leak": rate}], schedule(limit, limit, window)),
        # One is being served, and as many wait as the capacity says.
        Face("queue", [{"algorithm": "leaky_bucket", "capacity": limit, "leak": rate, "queue": True}],
             schedule(limit + 1, limit, window)),
        Face("epoch", [fixed], lambda began, ended: limit * touched(began, ended, window)),
        Face("first", [{**fixed, "anchor": "first_request"}],
             lambda began, ended: limit * ((ended - began) // window + 1)),
        Face("calendar", [{"algorithm": "fixed_window", "limit": days, "anchor": {"calendar": "day", "zone": "Asia/Tokyo"}}],
             lambda began, ended: days * touched(began + TOKYO, ended + TOKYO, DAY)),
        Face("log", [f"{part}/{window // 10_000}ms", rate, f"{2 * limit}/{3 * window // 1_000}ms"],
             log([(part, window // 10), (limit, window), (2 * limit, 3 * window)]), "sliding_window_log"),
        Face("strict", [{**count, "buckets": BUCKETS}], buckets(limit, window // BUCKETS, BUCKETS + 1)),
        Face("loose", [{**count, "buckets": BUCKETS, "strict": False}], buckets(limit, window // BUCKETS, BUCKETS)),
        Face("weighted", [count], weighted(limit, window)),
    ]


def touched(began, ended, window):
    """How many windows of the grid have an instant of the interval."""
    return ended // window - began // window + 1


def schedule(capacity, limit, window):
    return lambda began, ended: capacity + limit * (ended - began) // window


def buckets(limit, width, summed):
    """At most the limit in any so many buckets in a row."""
    return lambda began, ended: limit * -(-touched(began, ended, width) // summed)


def weighted(limit, window):
    """All of it in the first window, and one less in each that follows on a full one: the last unit would fit at its very end."""

    def most(began, ended):
        before = ended // window - began // window
        if not before:
            return limit
        previous = limit if before == 1 else limit - 1
        left = window - ended % window
        return limit + (limit - 1) * (before - 1) + limit - -(-previous * left // window)

    return most


def log(windows):
    """At most so many in every half-open interval of such a length, the shortest first."""

    def most(windows, length):
        """In a closed interval of this length."""
        *shorter, (limit, window) = windows
        if not shorter:
            return limit * (length // window + 1)
        whole = min(limit, most(shorter, window - 1))
        return whole * (length // window) + min(limit, most(shorter, length % window))

    return lambda began, ended: most(windows, ended - began)
