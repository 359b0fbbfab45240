#!/usr/bin/env python3
"""Compares two builds of Tidegate in one run on loopback, for example before and after a change.

    compare.py --before ../before/target/dist/tidegate --after target/dist/tidegate

In each round, both servers get every load, in alternating order. The table has the medians of the
per-round ratios, after to before.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from statistics import median

import checks
from http_bench import ListenerKind
from limits import AMPLE_CAPACITY, ClThrottle, Throttle, tidegate_body, under_load
from load import redis_benchmark, wrk
from measure import program
from processes import Server, reserve_port

DEPTHS = (1, 16, 64)
# The default algorithm of a limit may differ between the builds, so it is stated.
RULES = f"""rules:
  - name: api
    key: [user]
    limits: [{{rate: {AMPLE_CAPACITY}/30d, burst: {AMPLE_CAPACITY}, algorithm: gcra}}]
  - name: login
    when: {{path: /login}}
    key: [user]
    limits: [{{rate: 5/min, algorithm: gcra}}]
"""


def main():
    options = parse()
    # Exiting with an exception closes the context managers, which stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        servers = [
            running.enter_context(start(name, path, settings, folder))
            for name, path, settings in (
                ("before", options.before, options.before_settings),
                ("after", options.after, options.after_settings),
            )
        ]
        for server in servers:
            prepare(server)
        cells = measure(servers, options.rounds, options.seconds)
        for server in servers:
            verify(server)
    print_table(cells)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, type=program)
    parser.add_argument("--after", required=True, type=program)
    for build in ("before", "after"):
        parser.add_argument(
            f"--{build}-settings",
            default="",
            help=f"settings for the configuration file of the build {build}, such as 'top: off'",
        )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=2, help="the length of each load")
    return parser.parse_args()


def start(name, path, settings, folder):
    resp, http = reserve_port(), reserve_port()
    config = os.path.join(folder, f"{name}.yaml")
    with open(config, "w") as file:
        file.write(
            f"listen:\n  http: 127.0.0.1:{http}\n  resp: 127.0.0.1:{resp}\n"
            f"  admin: 127.0.0.1:{reserve_port()}\n  grpc: off\n{settings}\n{RULES}"
        )
    return Server(name, [path, "serve", "--config", config], [resp, http])


def prepare(server):
    """Checks that the server admits exactly its limits, and exhausts the keys of `denied`."""
    resp, http = server.ports
    for command in (Throttle, ClThrottle):
        checks.resp_counts_exactly(server.name, resp, command, f"{command.prefix}1")
        checks.resp_spend(server.name, resp, command)
    checks.http_counts_exactly(server.name, http, "/v1/throttle", tidegate_body, "h1")
    wrk(server, http, throttle(server).request("denied", cost=2), "each", 5)


def verify(server):
    """Checks that the loads arrived and that the limits are still exact."""
    resp, http = server.ports
    for command in (Throttle, ClThrottle):
        checks.resp_load_arrived(server.name, resp, command)
        checks.resp_counts_exactly(server.name, resp, command, f"{command.prefix}2")
    checks.http_load_arrived(
        server.name, http, "/v1/throttle", throttle(server).denied_body
    )
    checks.http_counts_exactly(server.name, http, "/v1/throttle", tidegate_body, "h2")


def throttle(server):
    return ListenerKind(server, server.ports[1], "/v1/throttle", tidegate_body, True)


def loads():
    """Returns each load: its name, and a function that measures it on a server."""
    for command in (Throttle, ClThrottle):
        for depth in DEPTHS:
            for load in ("allowed", "denied"):
                yield (
                    f"{command.name}, -P {depth}, {load}",
                    lambda server, seconds, command=command, depth=depth, load=load: (
                        redis_benchmark(
                            server,
                            server.ports[0],
                            under_load(command, load, "__rand_int__"),
                            depth,
                            seconds,
                        )
                    ),
                )
    for load in ("allowed", "denied", "varied"):
        yield (
            f"POST /v1/throttle, {load}",
            lambda server, seconds, load=load: wrk(
                server, server.ports[1], throttle(server).request(load), "random", seconds
            ),
        )
    check = {"path": "/v1/check", "json": '{"entries":{"user":"KEY","path":"/items"}}'}
    yield (
        "POST /v1/check, allowed",
        lambda server, seconds: wrk(server, server.ports[1], check, "random", seconds),
    )


def measure(servers, rounds, seconds):
    """Returns the measurements of each load: a pair per round, before and after."""
    cells = {}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        for name, run in loads():
            order = servers if turn % 2 == 0 else servers[::-1]
            measured = {server.name: run(server, seconds) for server in order}
            cells.setdefault(name, []).append((measured["before"], measured["after"]))
    return cells


def print_table(cells):
    print(
        "| load | decisions/s, before | after | after / before "
        "| CPU per decision, before | after | after / before |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, pairs in cells.items():
        before, after = zip(*pairs)
        print(
            f"| {name} "
            f"| {median(run.rate for run in before):,.0f} | {median(run.rate for run in after):,.0f} "
            f"| {median(b.rate / a.rate for a, b in pairs):.3f} "
            f"| {median(run.cpu for run in before):.2f} us | {median(run.cpu for run in after):.2f} us "
            f"| {median(b.cpu / a.cpu for a, b in pairs):.3f} |"
        )


if __name__ == "__main__":
    main()
