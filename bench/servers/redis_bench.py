#!/usr/bin/env python3
"""Compares the Redis store with minimal scripts, and measures Tidegate's server on Redis.

The method is in METHOD.md.

    redis_bench.py --tidegate target/dist/tidegate --callers bench/target/release/callers \\
        --throttlecrab bench/target/peers/bin/throttlecrab-server
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from statistics import mean, median

import checks
from clients import Resp
from limits import KEYS, throttlecrab_body, tidegate_body
from load import pipelined, redis_benchmark, wrk
from measure import benchmark_parser, start_redis, start_throttlecrab
from processes import Server, reserve_port
from resp_bench import against_target

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.join(HERE, "../../crates/redis/src/scripts/single_key_gcra.lua")
EXACT = ("time_get_psetex", "time_get_set")
MINIMAL = (*EXACT, "pttl_get")

# The emission interval and the tolerance of GCRA in microseconds. No request is denied.
INTERVAL, TOLERANCE = 1_000_000, 10_000_000_000_000
# The same numbers in our script's format: the value's header, both numbers with 7 bytes each, and
# the tolerance's prefix byte.
OURS_NUMBERS = b"head" + INTERVAL.to_bytes(7, "big") + TOLERANCE.to_bytes(7, "big") + b"\xa9"

CPU_OF_MINIMAL, FOUR_OF_ONE, RATE_OF_MINIMAL = 1.1, 1.5, 0.6
CALLERS = 256
SINGLE = ("gcra", "interval", "fixed", "weighted")
SAME, MIXED = ",".join(["gcra"] * 4), ",".join(SINGLE)

# The CPU times per decision in an earlier run of limitador-server and throttlecrab-server. With
# their ratio, limitador-server's CPU time is estimated from this run's result for
# throttlecrab-server.
LIMITADOR_US, THROTTLECRAB_US = 60, 17.3
OF_LIMITADOR = 1 / 3
OF_MEMORY = 1.1


def main():
    options = parse()
    # Exiting with an exception closes the context managers, which stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    rounds, seconds = (1, 1) if options.smoke else (options.rounds, 2)
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        redis = running.enter_context(start_redis(folder))
        memory = running.enter_context(start_tidegate(options.tidegate, folder, "memory"))
        fleet = running.enter_context(start_tidegate(options.tidegate, folder, redis))
        throttlecrab = running.enter_context(start_throttlecrab(options.throttlecrab))
        decisions(redis, options.callers, rounds, seconds)
        listener(redis, fleet, throttlecrab, rounds, seconds)
        exhausted_key(redis, fleet, memory, rounds, seconds)


def parse():
    return benchmark_parser(__doc__, ("tidegate", "callers", "throttlecrab"), rounds=5).parse_args()


def start_tidegate(path, folder, store):
    """Starts Tidegate with the memory store, or with the Redis server `store`."""
    http, resp = reserve_port(), reserve_port()
    name = "memory" if store == "memory" else "redis"
    if store != "memory":
        # There is no local fallback. Denials are cached until they expire, for at most 60 s.
        url = f"redis://127.0.0.1:{store.ports[0]}"
        store = {"redis": url, "timeout": "5s", "on_failure": "closed", "denial_cache_ttl": "60s"}
    config = os.path.join(folder, f"{name}.yaml")
    listen = {
        "http": f"127.0.0.1:{http}",
        "resp": f"127.0.0.1:{resp}",
        "admin": "off",
        "grpc": "off",
    }
    with open(config, "w") as file:
        json.dump({"listen": listen, "store": store}, file)  # JSON is YAML, too
    return Server(f"tidegate on {name}", [path, "serve", "--config", config], [http, resp])


# Benchmarks of decisions in Redis.


def decisions(redis, callers, rounds, seconds):
    """Measures the scripts in pipelines of one connection, and rules with 256 callers, in
    rounds."""
    port = redis.ports[0]
    client = Resp(port)
    scripts = {name: words(client, name) for name in ("ours", *MINIMAL)}
    rules = (*SINGLE, SAME, MIXED)
    for rule in rules:
        call(redis, callers, rule, 0.3)  # loads the scripts into Redis
    cells, counted = {}, {}
    for turn in range(rounds):
        for name in in_turn(list(scripts), turn):
            cells.setdefault((name, 64), []).append(
                pipelined(redis, port, scripts[name], 64, seconds)
            )
            if name in EXACT:
                cells.setdefault((name, 16), []).append(
                    redis_benchmark(redis, port, scripts[name], 16, seconds)
                )
        for rule in in_turn(list(rules), turn):
            before = commands(client)
            cells.setdefault(rule, []).append(call(redis, callers, rule, seconds))
            counted.setdefault(rule, []).append(
                (commands(client) - before, cells[rule][-1].decisions)
            )
    client.close()
    print_scripts(cells)
    print_rules(cells, counted)


def words(client, name):
    """Loads a script, and returns the command that runs it for a random key."""
    path = OURS if name == "ours" else os.path.join(HERE, "scripts", f"{name}.lua")
    with open(path) as file:
        sha = client.ask([["SCRIPT", "LOAD", file.read()]])[0].decode()
    numbers = [OURS_NUMBERS] if name == "ours" else [INTERVAL, TOLERANCE]
    return ["EVALSHA", sha, 1, f"{name}:__rand_int__", *numbers]


def in_turn(names, turn):
    """Rotates the names, so that each round begins with a different name."""
    at = turn % len(names)
    return names[at:] + names[:at]


class CallerRun:
    """A run of callers: decisions per second, and the CPU time per decision of Redis (`cpu`) and of
    the callers (`own`) in microseconds."""

    def __init__(self, rate, cpu, own, decisions):
        self.rate, self.cpu, self.own, self.decisions = rate, cpu, own, decisions


def call(redis, callers, rule, seconds):
    command = [
        callers,
        f"redis://127.0.0.1:{redis.ports[0]}",
        rule,
        str(CALLERS),
        str(int(seconds * 1_000)),
    ]
    before, children = redis.cpu_seconds(), sum(os.times()[2:4])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    decided, took = int(done.stdout.split()[0]), float(done.stdout.split()[1])
    used, own = redis.cpu_seconds() - before, sum(os.times()[2:4]) - children
    return CallerRun(decided / took, used / decided * 1e6, own / decided * 1e6, decided)


def commands(client):
    """Returns how many commands that can make a decision Redis has executed."""
    stats = client.ask([["INFO", "commandstats"]])[0].decode()
    found = {
        line.split(":")[0]: int(line.split("calls=")[1].split(",")[0])
        for line in stats.splitlines()
        if "calls=" in line
    }
    deciding = (
        "cmdstat_evalsha",
        "cmdstat_eval",
        "cmdstat_fcall",
        "cmdstat_multi",
        "cmdstat_exec",
        "cmdstat_script|load",
    )
    return sum(found.get(name, 0) for name in deciding)


def print_scripts(cells):
    print(
        "\n## scripts\n\n| script | -P | decisions/s | Redis' CPU per decision |\n| --- | --- | "
        "--- | --- |"
    )
    for (name, depth), runs in sorted(
        (cell for cell in cells.items() if isinstance(cell[0], tuple)),
        key=lambda cell: cell[0][::-1],
    ):
        print(
            f"| {name} | {depth} | {median(run.rate for run in runs):,.0f} | "
            f"{median(run.cpu for run in runs):.2f} us |"
        )
    print()
    best = min(EXACT, key=lambda name: median(run.cpu for run in cells[name, 64]))
    for name in (best, "pttl_get"):
        ratio = median(ours.cpu / its.cpu for ours, its in zip(cells["ours", 64], cells[name, 64]))
        target = CPU_OF_MINIMAL if name == best else None
        print(
            f"- Redis' CPU per decision with our script is {ratio:.3f} times "
            f"`{name}`'s{against_target(ratio, target, at_most=True)}"
        )


def print_rules(cells, counted):
    print(
        "\n## rules\n\n| limits of the rule | decisions/s | Redis' CPU per decision | callers' "
        "CPU | commands per decision |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for rule in (*SINGLE, SAME, MIXED):
        runs, asked = cells[rule], sum(count for count, _ in counted[rule])
        each = asked / sum(decided for _, decided in counted[rule])
        print(
            f"| {rule.replace(',', ' + ')} | {median(run.rate for run in runs):,.0f} | "
            f"{median(run.cpu for run in runs):.2f} us "
            f"| {median(run.own for run in runs):.2f} us | {each:.6f} |"
        )
    print()
    same = median(four.cpu / one.cpu for four, one in zip(cells[SAME], cells["gcra"]))
    print(
        f"- four limits of one algorithm cost {same:.2f} times one "
        f"limit{against_target(same, FOUR_OF_ONE, at_most=True)}"
    )
    singles = list(zip(*(cells[rule] for rule in SINGLE)))
    mixed = median(
        four.cpu / mean(one.cpu for one in ones) for four, ones in zip(cells[MIXED], singles)
    )
    print(
        f"- four limits of different algorithms cost {mixed:.2f} times the mean of one limit of "
        f"each{against_target(mixed, FOUR_OF_ONE, at_most=True)}"
    )
    most_expensive = median(
        four.cpu / max(one.cpu for one in ones) for four, ones in zip(cells[MIXED], singles)
    )
    print(f"- and {most_expensive:.2f} times the most expensive of these limits")
    best = max(EXACT, key=lambda name: median(run.rate for run in cells[name, 16]))
    rate = median(ours.rate / its.rate for ours, its in zip(cells["gcra"], cells[best, 16]))
    print(
        f"- {CALLERS} callers get {rate:.2f} times the decisions per second that `redis-benchmark "
        f"-P 16` gets from `{best}`" + against_target(rate, RATE_OF_MINIMAL, at_most=False)
    )
    exactly_one = all(count == decided for counts in counted.values() for count, decided in counts)
    print(
        "- one command, and so one round trip, per decision: "
        f"{'reached' if exactly_one else 'MISSED'}"
    )


# Benchmarks of the HTTP listener.


def listener(redis, fleet, throttlecrab, rounds, seconds):
    """Compares `POST /v1/throttle` on Redis with throttlecrab's `POST /throttle`."""
    port, crab = fleet.ports[0], throttlecrab.ports[1]
    checks.http_counts_exactly("tidegate on redis", port, "/v1/throttle", tidegate_body, "r1")
    numbers = (1_000_000, 1_000)
    ours = {"path": "/v1/throttle", "json": json.dumps(tidegate_body("ha:KEY", *numbers))}
    its = {"path": "/throttle", "json": json.dumps(throttlecrab_body("ha:KEY", *numbers))}
    cells = []
    for _ in range(rounds):
        before = redis.cpu_seconds()
        mine = wrk(fleet, port, ours, "random", seconds)
        behind = (redis.cpu_seconds() - before) / mine.decisions * 1e6
        if mine.refused:
            raise SystemExit(f"{mine.refused} of {mine.decisions} requests were denied, expected 0")
        cells.append((mine, behind, wrk(throttlecrab, crab, its, "random", seconds)))
    checks.http_counts_exactly("tidegate on redis", port, "/v1/throttle", tidegate_body, "r2")
    print(
        f"\n## HTTP, {KEYS:,} keys\n\n| server | decisions/s | server CPU per decision | Redis' "
        "CPU |\n| --- | --- | --- | --- |"
    )
    mine, theirs = [cell[0] for cell in cells], [cell[2] for cell in cells]
    print(
        f"| tidegate on Redis | {median(run.rate for run in mine):,.0f} | "
        f"{median(run.cpu for run in mine):.2f} us "
        f"| {median(cell[1] for cell in cells):.2f} us |"
    )
    print(
        f"| throttlecrab-server | {median(run.rate for run in theirs):,.0f} | "
        f"{median(run.cpu for run in theirs):.2f} us | - |\n"
    )
    ratio = (
        median(one.cpu / other.cpu for one, other in zip(mine, theirs))
        * THROTTLECRAB_US
        / LIMITADOR_US
    )
    print(
        f"- CPU per decision is {ratio:.3f} times limitador-server's on Redis, scaled by "
        "throttlecrab-server" + against_target(ratio, round(OF_LIMITADOR, 3), at_most=True)
    )


# Benchmarks of an exhausted key.


def exhausted_key(redis, fleet, memory, rounds, seconds):
    """Measures denials at the maximum rate, for one key that is exhausted for a month."""
    client = Resp(redis.ports[0])
    cells, sent = [], 0
    body = {"path": "/v1/throttle", "json": json.dumps(tidegate_body("exhausted", 2, 1))}
    for server in (memory, fleet):
        wrk(server, server.ports[0], body, "random", 1)
    for _ in range(rounds):
        pair = {}
        for server in (memory, fleet):
            before = commands(client)
            pair[server] = wrk(server, server.ports[0], body, "random", seconds)
            if pair[server].refused != pair[server].decisions:
                raise SystemExit(f"{server.name} admitted an exhausted key")
            sent += commands(client) - before
        cells.append((pair[memory], pair[fleet]))
    client.close()
    print("\n## an exhausted key\n\n| store | denials/s | CPU per denial |\n| --- | --- | --- |")
    for name, runs in zip(("memory", "Redis"), zip(*cells)):
        print(
            f"| {name} | {median(run.rate for run in runs):,.0f} | "
            f"{median(run.cpu for run in runs):.2f} us |"
        )
    ratio = median(ours.cpu / its.cpu for its, ours in cells)
    print(
        f"\n- CPU per denial is {ratio:.3f} times the memory "
        f"store's{against_target(ratio, OF_MEMORY, at_most=True)}"
    )
    print(
        f"- commands in Redis for {sum(cell[1].decisions for cell in cells):,} denials: {sent}, "
        f"target 0: {'MISSED' if sent else 'reached'}"
    )


if __name__ == "__main__":
    main()
