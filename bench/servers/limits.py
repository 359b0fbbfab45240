"""The limits under load, as each protocol writes them.

Two loads. In `allowed` no key ever comes near its limit, and each decision writes. In `denied` every key was spent
before, and gets one token back a month: every decision denies.
"""

MONTH = 2_592_000
ROOM, COMES_BACK = 1_000_000, 1_000  # a token every 43 minutes: what the load spends stays spent
KEYS = 100_000
CHECK_KEYS, CHECK_ATTEMPTS, CHECK_CAPACITY = 50, 40, 10


class Throttle:
    """`THROTTLE key max_burst count period [quantity]`: at most max_burst at once."""

    name, allowed_value, prefix = "THROTTLE", 1, "t"

    @staticmethod
    def words(key, capacity, count, quantity=1):
        return ["THROTTLE", key, capacity, count, MONTH, quantity]


class ClThrottle:
    """`CL.THROTTLE key max_burst count period [quantity]`: at most max_burst + 1 at once."""

    name, allowed_value, prefix = "CL.THROTTLE", 0, "c"

    @staticmethod
    def words(key, capacity, count, quantity=1):
        return ["CL.THROTTLE", key, capacity - 1, count, MONTH, quantity]


def under_load(command, load, key):
    """One request of a load. The quantity goes without saying."""
    if load == "allowed":
        return command.words(f"{command.prefix}a:{key}", ROOM, COMES_BACK)[:-1]
    return command.words(f"{command.prefix}d:{key}", 2, 1)[:-1]


def spending(command, key):
    """Spends a key of the `denied` load."""
    return command.words(f"{command.prefix}d:{key}", 2, 1, 2)


def tidegate_body(key, capacity, count, cost=1):
    """What Tidegate's `POST /v1/throttle` takes."""
    return {"key": key, "algorithm": "gcra", "rate": f"{count}/30d", "burst": capacity - 1, "cost": cost}


def throttlecrab_body(key, capacity, count, cost=1):
    """What throttlecrab's `POST /throttle` takes."""
    return {"key": key, "max_burst": capacity, "count_per_period": count, "period": MONTH, "quantity": cost}
