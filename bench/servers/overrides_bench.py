#!/usr/bin/env python3
"""Compares the server's CPU time of a check with and without a million overrides.

The method is in METHOD.md.

    overrides_bench.py --tidegate target/dist/tidegate
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
from statistics import median

from clients import Resp
from limits import AMPLE_CAPACITY
from load import run_wrk
from measure import benchmark_parser
from processes import Server, reserve_port
from resp_bench import against_target
from reservations_bench import LUA, USERS, entries, over_resp

OVERRIDES = 1_000_000
OF_CHECK = 1.1
# The commands in flight on the connection over the Redis protocol.
DEPTHS = (1, 16)
# The number of the first user with an override.
FIRST = {
    "no overrides": None,
    "1,000,000 overrides of other users": USERS,
    "1,000,000 overrides, one of them of each user": 0,
}


def main():
    options = benchmark_parser(__doc__, ("tidegate",), rounds=5).parse_args()
    # Exiting with an exception closes the context managers, which stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    rounds, seconds = (1, 1) if options.smoke else (options.rounds, 3)
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        servers = [
            running.enter_context(start(options.tidegate, folder, at, name))
            for at, name in enumerate(FIRST)
        ]
        for server in servers:
            applies_overrides(server)
        cells = measure(servers, rounds, seconds)
    print_table(cells)


def start(path, folder, at, name):
    """Starts a server whose memory store restores the overrides from their file."""
    resp, http = reserve_port(), reserve_port()
    config, snapshot = (os.path.join(folder, f"{file}{at}") for file in ("config", "snapshot"))
    if FIRST[name] is not None:
        with open(f"{snapshot}.overrides", "w") as file:
            for user in range(FIRST[name], FIRST[name] + OVERRIDES):
                override = {
                    "rule": "tokens",
                    "key": entries(user)[1:],
                    "limits": [f"{2 * AMPLE_CAPACITY}/30d"],
                    "reason": "launch",
                }
                file.write(json.dumps(override) + "\n")
    listen = {
        "http": f"127.0.0.1:{http}",
        "resp": f"127.0.0.1:{resp}",
        "admin": "off",
        "grpc": "off",
    }
    rule = {"name": "tokens", "key": ["user"], "limits": [f"{AMPLE_CAPACITY}/30d"]}
    store = {"memory": {"snapshot": snapshot}}
    with open(config, "w") as file:
        json.dump({"listen": listen, "store": store, "rules": [rule]}, file)  # JSON is YAML, too
    return Server(name, [path, "serve", "--config", config], [resp, http])


def applies_overrides(server):
    """Checks that exactly the users with an override have its limit."""
    client, first = Resp(server.ports[0]), FIRST[server.name]
    for user in (0, USERS - 1, USERS, OVERRIDES - 1, OVERRIDES + USERS):
        has_override = first is not None and first <= user < first + OVERRIDES
        limit = client.ask([["TIDEGATE.CHECK", "PEEK", *entries(user)]])[0][2]
        if limit != AMPLE_CAPACITY * (2 if has_override else 1):
            raise SystemExit(f"{server.name}: user {user} has the limit {limit}")
    client.close()


def measure(servers, rounds, seconds):
    cells = {}
    for turn in range(rounds):
        for wire in ("HTTP", *DEPTHS):
            for server in servers if turn % 2 == 0 else reversed(servers):
                if wire == "HTTP":
                    run = run_wrk(server, server.ports[1], "", LUA, ["check", USERS], seconds)
                    if run.refused:
                        raise SystemExit(f"{server.name} refused {run.refused} requests")
                else:
                    run = over_resp(server, wire, "check", seconds)
                cells.setdefault((wire, server.name), []).append(run)
    return cells


def print_table(cells):
    print("| protocol | overrides | CPU per check | ratio |")
    print("| --- | --- | --- | --- |")
    verdicts = []
    for wire, name in cells:
        runs = cells[wire, name]
        ratio = median(
            run.cpu / alone.cpu for run, alone in zip(runs, cells[wire, "no overrides"])
        )
        protocol = wire if wire == "HTTP" else f"Redis protocol, -P {wire}"
        print(f"| {protocol} | {name} | {median(run.cpu for run in runs):.2f} us | {ratio:.3f} |")
        if name != "no overrides":
            verdicts.append(
                f"- {protocol}, {name}: {ratio:.3f} of a check's CPU time"
                + against_target(ratio, OF_CHECK, at_most=True)
            )
    print()
    print("\n".join(verdicts))


if __name__ == "__main__":
    main()
