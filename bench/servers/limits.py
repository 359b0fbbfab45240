"""The limits for the loads, in each protocol's format.

In the load `allowed`, no key comes near its limit, and each decision writes. In the load `denied`,
every key is exhausted beforehand and refills one token per month, so each decision is a denial.
"""

MONTH = 2_592_000
# The limit of `allowed`. It refills one token in 43 minutes, so almost no token is refilled during
# a load.
AMPLE_CAPACITY, AMPLE_COUNT = 1_000_000, 1_000
KEYS = 100_000
CHECK_KEYS, CHECK_ATTEMPTS, CHECK_CAPACITY = 50, 40, 10


class Throttle:
    """`THROTTLE key max_burst count period [quantity]`: admits at most `max_burst` at once."""

    name, allowed_value, prefix = "THROTTLE", 1, "t"

    @staticmethod
    def words(key, capacity, count, quantity=1):
        return ["THROTTLE", key, capacity, count, MONTH, quantity]


class ClThrottle:
    """`CL.THROTTLE key max_burst count period [quantity]`: admits at most `max_burst` + 1 at
    once."""

    name, allowed_value, prefix = "CL.THROTTLE", 0, "c"

    @staticmethod
    def words(key, capacity, count, quantity=1):
        return ["CL.THROTTLE", key, capacity - 1, count, MONTH, quantity]


def under_load(command, load, key):
    """Returns a load's command for a key. It omits the quantity, which is 1 by default."""
    if load == "allowed":
        return command.words(f"{command.prefix}a:{key}", AMPLE_CAPACITY, AMPLE_COUNT)[:-1]
    return command.words(f"{command.prefix}d:{key}", 2, 1)[:-1]


def spending(command, key):
    """Returns the command that exhausts a key of the load `denied`."""
    return command.words(f"{command.prefix}d:{key}", 2, 1, 2)


def tidegate_body(key, capacity, count, cost=1):
    """Returns the body for Tidegate's `POST /v1/throttle`."""
    return {
        "key": key,
        "algorithm": "gcra",
        "rate": f"{count}/30d",
        "burst": capacity - 1,
        "cost": cost,
    }


def throttlecrab_body(key, capacity, count, cost=1):
    """Returns the body for throttlecrab's `POST /throttle`."""
    return {
        "key": key,
        "max_burst": capacity,
        "count_per_period": count,
        "period": MONTH,
        "quantity": cost,
    }
