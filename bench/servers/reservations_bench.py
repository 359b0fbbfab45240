#!/usr/bin/env python3
"""Compares the server's CPU time of a reservation and its settlement with that of one check.

The method is in METHOD.md.

    reservations_bench.py --tidegate target/dist/tidegate
"""

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from statistics import median

from clients import Resp
from limits import AMPLE_CAPACITY
from load import Measured, run_wrk
from measure import benchmark_parser, start_redis
from processes import Server, reserve_port
from resp_bench import against_target

LUA = os.path.join(os.path.dirname(__file__), "reservations.lua")
PAIR_OF_CHECK = 2.2
# The commands in flight on the connection over the Redis protocol.
DEPTHS = (1, 16)
RESERVED, SPENT = 3, 1
USERS = 10_000


def main():
    options = parse()
    # Exiting with an exception closes the context managers, which stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    rounds, seconds = (1, 1) if options.smoke else (options.rounds, 3)
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        redis = running.enter_context(start_redis(folder))
        stores = {"memory": "memory", "Redis": {"redis": f"redis://127.0.0.1:{redis.ports[0]}"}}
        servers = {
            name: running.enter_context(start(options.tidegate, folder, name, store))
            for name, store in stores.items()
        }
        for server in servers.values():
            counts_exactly(server)
        cells = measure(servers, redis, rounds, seconds)
        for server in servers.values():
            load_arrived(server)
    print_table(cells)


def parse():
    return benchmark_parser(__doc__, ("tidegate",), rounds=5).parse_args()


def start(path, folder, name, store):
    resp, http = reserve_port(), reserve_port()
    config = os.path.join(folder, f"{name}.json")
    if store != "memory":
        store = {**store, "timeout": "5s", "on_failure": "closed"}
    listen = {
        "http": f"127.0.0.1:{http}",
        "resp": f"127.0.0.1:{resp}",
        "admin": "off",
        "grpc": "off",
    }
    rule = {"name": "tokens", "key": ["user"], "limits": [f"{AMPLE_CAPACITY}/30d"]}
    with open(config, "w") as file:
        json.dump({"listen": listen, "store": store, "rules": [rule]}, file)  # JSON is YAML, too
    return Server(f"tidegate on {name}", [path, "serve", "--config", config], [resp, http])


def entries(user):
    return ["user", f"user-{user:012}"]


def left(server, user):
    """Returns how many units the limit of a user still admits."""
    client = Resp(server.ports[0])
    remaining = remaining_after_check(client, [user])[0] + 1
    client.close()
    return remaining


def remaining_after_check(client, users):
    """Returns how many units would remain after a check of each user. Charges nothing."""
    replies = client.ask([["TIDEGATE.CHECK", "PEEK", *entries(user)] for user in users])
    return [reply[3] for reply in replies]


def counts_exactly(server):
    """Checks that a pair charges only the final cost."""
    client, user = Resp(server.ports[0]), USERS
    token = client.ask([["TIDEGATE.RESERVE", "COST", RESERVED, *entries(user)]])[0][6]
    held = left(server, user)
    client.ask([["TIDEGATE.SETTLE", token, SPENT]])
    settled = left(server, user)
    client.close()
    expected = AMPLE_CAPACITY - RESERVED, AMPLE_CAPACITY - SPENT
    if (held, settled) != expected:
        raise SystemExit(f"{server.name}: {held}, {settled} units are left, expected {expected}")


def load_arrived(server):
    """Checks that the load was charged."""
    users = random.Random(11).sample(range(USERS), 500)
    client = Resp(server.ports[0])
    remaining = remaining_after_check(client, users)
    client.close()
    if sum(units < AMPLE_CAPACITY - 1 for units in remaining) < len(users) / 4:
        raise SystemExit(f"{server.name} did not count the load that it received")


def measure(servers, redis, rounds, seconds):
    cells = {}
    for turn in range(rounds):
        for store, server in servers.items():
            loads = [("HTTP", mode) for mode in ("check", "pair")]
            loads += [(depth, mode) for depth in DEPTHS for mode in ("check", "pair")]
            for wire, mode in loads if turn % 2 == 0 else reversed(loads):
                before = redis.cpu_seconds()
                if wire == "HTTP":
                    run = run_wrk(server, server.ports[1], "", LUA, [mode, USERS], seconds)
                    if run.refused:
                        raise SystemExit(f"{server.name} refused {run.refused} requests of {mode}")
                else:
                    run = over_resp(server, wire, mode, seconds)
                run.redis_cpu = (redis.cpu_seconds() - before) / run.decisions * 1e6
                cells.setdefault((store, wire, mode), []).append(run)
    return cells


def over_resp(server, depth, mode, seconds):
    """Sends pipelines of `depth` commands for `seconds` seconds. Returns the CPU time per command."""
    command = "TIDEGATE.CHECK" if mode == "check" else "TIDEGATE.RESERVE"
    users = random.Random(1).sample(range(USERS), USERS)
    commands = [Resp.encode([command, "COST", RESERVED, *entries(user)]) for user in users]
    client, count, turn = Resp(server.ports[0]), 0, 0
    before, began = server.cpu_seconds(), time.monotonic()
    while time.monotonic() < began + seconds:
        batch = [commands[(turn + at) % USERS] for at in range(depth)]
        turn += depth
        client.send(b"".join(batch))
        replies = [client.reply() for _ in batch]
        count += depth
        if mode == "pair":
            settles = [["TIDEGATE.SETTLE", reply[6], SPENT] for reply in replies]
            client.send(b"".join(map(Resp.encode, settles)))
            for _ in settles:
                settled = client.reply()
                if settled[:2] != [SPENT, RESERVED - SPENT]:
                    raise SystemExit(f"{server.name} replied {settled} to a settlement")
            count += depth
    rate = count / (time.monotonic() - began)
    client.close()
    return Measured(rate, (server.cpu_seconds() - before) / count * 1e6, count)


def print_table(cells):
    print("| store | protocol | check | reservation and settlement | ratio | Redis: ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    verdicts = []
    for store, wire in dict.fromkeys((store, wire) for store, wire, _ in cells):
        checks, pairs = cells[store, wire, "check"], cells[store, wire, "pair"]
        # Half of the requests of a pair's load are reservations, and half are settlements.
        ratio = median(2 * pair.cpu / check.cpu for pair, check in zip(pairs, checks))
        protocol = wire if wire == "HTTP" else f"Redis protocol, -P {wire}"
        in_redis = "-"
        if store == "Redis":
            in_redis = median(
                2 * pair.redis_cpu / check.redis_cpu for pair, check in zip(pairs, checks)
            )
            in_redis = f"{in_redis:.2f}"
        print(
            f"| {store} | {protocol} | {median(run.cpu for run in checks):.2f} us "
            f"| {2 * median(run.cpu for run in pairs):.2f} us | {ratio:.2f} | {in_redis} |"
        )
        verdicts.append(
            f"- {store}, {protocol}: {ratio:.2f} of a check's CPU time"
            + against_target(ratio, PAIR_OF_CHECK, at_most=True)
        )
    print()
    print("\n".join(verdicts))


if __name__ == "__main__":
    main()
