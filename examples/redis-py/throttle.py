"""Queries Tidegate with redis-py: with a limit in the request, and with the rules in the file.

    python3 throttle.py redis://127.0.0.1:6380
"""

import sys

import redis

tidegate = redis.Redis.from_url(sys.argv[1], decode_responses=True)


def throttle(key, max_burst, count, period_s):
    """Checks a limit that is sent with the request, with redis-cell's command."""
    limited, limit, remaining, retry_after_s, _ = tidegate.execute_command(
        "CL.THROTTLE", key, max_burst, count, period_s
    )
    return "wait" if limited else "go", limit, remaining


def check(**entries):
    """Checks the rules in the file."""
    words = [word for entry in entries.items() for word in entry]
    allowed, rule, limit, remaining, reset_after_ms, retry_after_ms = tidegate.execute_command(
        "TIDEGATE.CHECK", *words
    )
    return "go" if allowed else "wait", rule, remaining


print("3 at once, then 1 an hour:")
for _ in range(4):
    print(" ", *throttle("py:report:42", 2, 1, 3600))

print("10 logins, then 1 an hour:")
for attempt in range(1, 12):
    answer = check(path="/login", method="POST", ip="198.51.100.8")
    if attempt in (1, 10, 11):
        print(" ", attempt, *answer)

print("Many at once, in one round trip:")
pipeline = tidegate.pipeline()
for user in ("ada", "bob", "ada"):
    pipeline.execute_command("CL.THROTTLE", f"py:mail:{user}", 0, 1, 3600)
print(" ", ["wait" if limited else "go" for limited, *_ in pipeline.execute()])
