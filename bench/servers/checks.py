"""Checks that each server admits exactly the limit, even after a load. Raises SystemExit
otherwise."""

import random

from clients import Http, Resp
from limits import CHECK_ATTEMPTS, CHECK_CAPACITY, CHECK_KEYS, KEYS, spending, under_load

SAMPLE = 1_000


def counts_exactly(name, tag, allowed):
    """Checks that 10 of 40 requests are admitted for each of 50 keys with a limit of 10.
    `allowed(keys)` sends one request per key, and returns whether each was admitted."""
    attempts = [f"check:{tag}:{key}" for key in range(CHECK_KEYS)] * CHECK_ATTEMPTS
    random.Random(7).shuffle(attempts)
    admitted = sum(allowed(attempts))
    expected = CHECK_KEYS * CHECK_CAPACITY
    if admitted != expected:
        raise SystemExit(
            f"{name} admitted {admitted} of {len(attempts)} requests, expected {expected}"
        )


def resp_counts_exactly(name, port, command, tag):
    client = Resp(port)
    counts_exactly(
        f"{name} {command.name}",
        tag,
        lambda keys: [
            reply[0] == command.allowed_value
            for reply in client.ask([command.words(key, CHECK_CAPACITY, 1) for key in keys])
        ],
    )
    client.close()


def http_counts_exactly(name, port, path, body, tag):
    client = Http(port, path)
    counts_exactly(
        name, tag, lambda keys: [client.allowed(body(key, CHECK_CAPACITY, 1)) for key in keys]
    )
    client.close()


def resp_spend(name, port, command):
    """Exhausts the limit of every key of the `denied` load."""
    client = Resp(port)
    replies = client.ask([spending(command, f"{key:012}") for key in range(KEYS)])
    client.close()
    if any(reply[0] != command.allowed_value for reply in replies):
        raise SystemExit(f"{name} {command.name} denied a new key")


def sampled_keys():
    return [f"{key:012}" for key in random.Random(11).sample(range(KEYS), SAMPLE)]


def resp_load_arrived(name, port, command):
    """After the load, keys of `denied` must be denied, and keys of `allowed` must have fewer units
    left than a new key."""
    client = Resp(port)
    denied = client.ask([under_load(command, "denied", key) for key in sampled_keys()])
    if any(reply[0] == command.allowed_value for reply in denied):
        raise SystemExit(f"{name} {command.name} admitted an exhausted key after the load")
    unused = client.ask([under_load(command, "allowed", "unused")])[0][2]
    spent = client.ask([under_load(command, "allowed", key) for key in sampled_keys()])
    if sum(reply[2] < unused for reply in spent) < SAMPLE * 0.9:
        raise SystemExit(f"{name} {command.name} did not count the load it received")
    client.close()


def http_load_arrived(name, port, path, denied_body):
    """Checks that, after the load, keys of the load `denied` are denied."""
    client = Http(port, path)
    if any(client.allowed(denied_body(f"hd:{key}")) for key in sampled_keys()):
        raise SystemExit(f"{name} {path} admitted an exhausted key after the load")
    client.close()
