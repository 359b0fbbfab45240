#!/usr/bin/env python3
"""The store in Redis beside bare scripts, and Tidegate with Redis behind it, in one run. METHOD.md says how.

    redis_bench.py --tidegate target/release/tidegate --callers bench/target/release/callers \\
        --throttlecrab bench/target/peers/bin/throttlecrab-server
"""

import argparse
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
from measure import program, start_redis, start_throttlecrab
from processes import Server, free_port
from resp_bench import judged

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.join(HERE, "../../crates/redis/src/scripts/schedule_alone.lua")
EXACT = ("time_get_psetex", "time_get_set")
BARE = (*EXACT, "pttl_get")

# How long a unit lasts and how far ahead it may lie, in microseconds: nobody is denied.
LASTING, ROOM = 1_000_000, 10_000_000_000_000
# The same for `ours`: the header of the value, these numbers in 7 bytes each, and the lead of the latter.
OURS_NUMBERS = b"head" + LASTING.to_bytes(7, "big") + ROOM.to_bytes(7, "big") + b"\xa9"

DECISION_OF_BARE, FOUR_OF_ONE, RATE_OF_BARE = 1.1, 1.5, 0.6
CALLERS = 256
ALONE = ("gcra", "interval", "fixed", "weighted")
SAME, MIXED = ",".join(["gcra"] * 4), ",".join(ALONE)

# From another day, when throttlecrab-server's HTTP listener needed so much: what both are scaled by.
LIMITADOR_US, THROTTLECRAB_US = 60, 17.3
OF_LIMITADOR = 1 / 3
OF_MEMORY = 1.1


def main():
    options = parse()
    # Leaving on a signal unwinds, and so stops the servers.
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
        abuser(redis, fleet, memory, rounds, seconds)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tidegate", "callers", "throttlecrab"):
        parser.add_argument(f"--{name}", required=True, type=program)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one short round: shows that it works, measures nothing")
    return parser.parse_args()


def start_tidegate(path, folder, store):
    """With the memory store, or on a Redis."""
    http, resp = free_port(), free_port()
    name = "memory" if store == "memory" else "redis"
    if store != "memory":
        # Nothing may fall back to the memory store, and a denial is repeated for as long as it stands.
        url = f"redis://127.0.0.1:{store.ports[0]}"
        store = {"redis": url, "timeout": "5s", "on_failure": "closed", "denial_cache_ttl": "60s"}
    config = os.path.join(folder, f"{name}.yaml")
    listen = {"http": f"127.0.0.1:{http}", "resp": f"127.0.0.1:{resp}", "admin": "off", "grpc": "off"}
    with open(config, "w") as file:
        json.dump({"listen": listen, "store": store}, file)  # which is YAML too
    return Server(f"tidegate on {name}", [path, "serve", "--config", config], [http, resp])


# Decisions at Redis.


def decisions(redis, callers, rounds, seconds):
    """The scripts under pipelines of one connection, and rules under 256 callers, in turns."""
    port = redis.ports[0]
    client = Resp(port)
    scripts = {name: words(client, name) for name in ("ours", *BARE)}
    rules = (*ALONE, SAME, MIXED)
    for rule in rules:
        call(redis, callers, rule, 0.3)  # so that the scripts are known
    cells, counted = {}, {}
    for turn in range(rounds):
        for name in in_turn(list(scripts), turn):
            cells.setdefault((name, 64), []).append(pipelined(redis, port, scripts[name], 64, seconds))
            if name in EXACT:
                cells.setdefault((name, 16), []).append(redis_benchmark(redis, port, scripts[name], 16, seconds))
        for rule in in_turn(list(rules), turn):
            before = commands(client)
            cells.setdefault(rule, []).append(call(redis, callers, rule, seconds))
            counted.setdefault(rule, []).append((commands(client) - before, cells[rule][-1].decisions))
    client.close()
    print_scripts(cells)
    print_rules(cells, counted)


def words(client, name):
    """The command that asks for a decision: of `ours`, as the store asks for it."""
    path = OURS if name == "ours" else os.path.join(HERE, "scripts", f"{name}.lua")
    with open(path) as file:
        sha = client.ask([["SCRIPT", "LOAD", file.read()]])[0].decode()
    numbers = [OURS_NUMBERS] if name == "ours" else [LASTING, ROOM]
    return ["EVALSHA", sha, 1, f"{name}:__rand_int__", *numbers]


def in_turn(names, turn):
    """Another goes first in each round."""
    at = turn % len(names)
    return names[at:] + names[:at]


class Called:
    """What callers got in a second, what Redis needed for a decision, and what the callers did, in microseconds."""

    def __init__(self, rate, cpu, own, decisions):
        self.rate, self.cpu, self.own, self.decisions = rate, cpu, own, decisions


def call(redis, callers, rule, seconds):
    command = [callers, f"redis://127.0.0.1:{redis.ports[0]}", rule, str(CALLERS), str(int(seconds * 1_000))]
    before, children = redis.cpu_seconds(), sum(os.times()[2:4])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    decided, took = int(done.stdout.split()[0]), float(done.stdout.split()[1])
    used, own = redis.cpu_seconds() - before, sum(os.times()[2:4]) - children
    return Called(decided / took, used / decided * 1e6, own / decided * 1e6, decided)


def commands(client):
    """How many scripts were called, and anything else that a decision could be asked with."""
    stats = client.ask([["INFO", "commandstats"]])[0].decode()
    found = {line.split(":")[0]: int(line.split("calls=")[1].split(",")[0]) for line in stats.splitlines() if "calls=" in line}
    asking = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_fcall", "cmdstat_multi", "cmdstat_exec", "cmdstat_script|load")
    return sum(found.get(name, 0) for name in asking)


def print_scripts(cells):
    print("\n## scripts\n\n| script | -P | decisions/s | Redis' CPU a decision |\n| --- | --- | --- | --- |")
    for (name, depth), runs in sorted((cell for cell in cells.items() if isinstance(cell[0], tuple)), key=lambda cell: cell[0][::-1]):
        print(f"| {name} | {depth} | {median(run.rate for run in runs):,.0f} | {median(run.cpu for run in runs):.2f} us |")
    print()
    best = min(EXACT, key=lambda name: median(run.cpu for run in cells[name, 64]))
    for name in (best, "pttl_get"):
        ratio = median(ours.cpu / its.cpu for ours, its in zip(cells["ours", 64], cells[name, 64]))
        target = DECISION_OF_BARE if name == best else None
        print(f"- Redis' CPU for one of our decisions is {ratio:.3f} of `{name}`'s{judged(ratio, target, at_most=True)}")


def print_rules(cells, counted):
    print("\n## rules\n\n| limits of the rule | decisions/s | Redis' CPU a decision | the callers' | commands a decision |\n"
          "| --- | --- | --- | --- | --- |")
    for rule in (*ALONE, SAME, MIXED):
        runs, asked = cells[rule], sum(count for count, _ in counted[rule])
        each = asked / sum(decided for _, decided in counted[rule])
        print(f"| {rule.replace(',', ' + ')} | {median(run.rate for run in runs):,.0f} | {median(run.cpu for run in runs):.2f} us "
              f"| {median(run.own for run in runs):.2f} us | {each:.6f} |")
    print()
    same = median(four.cpu / one.cpu for four, one in zip(cells[SAME], cells["gcra"]))
    print(f"- four limits of one kind cost {same:.2f} times what one does{judged(same, FOUR_OF_ONE, at_most=True)}")
    singles = list(zip(*(cells[rule] for rule in ALONE)))
    mixed = median(four.cpu / mean(one.cpu for one in ones) for four, ones in zip(cells[MIXED], singles))
    print(f"- four kinds together cost {mixed:.2f} times the mean of theirs alone{judged(mixed, FOUR_OF_ONE, at_most=True)}")
    dearest = median(four.cpu / max(one.cpu for one in ones) for four, ones in zip(cells[MIXED], singles))
    print(f"- and {dearest:.2f} times the dearest of them alone")
    best = max(EXACT, key=lambda name: median(run.rate for run in cells[name, 16]))
    rate = median(ours.rate / its.rate for ours, its in zip(cells["gcra"], cells[best, 16]))
    print(f"- {CALLERS} callers get {rate:.2f} of the decisions a second that `redis-benchmark -P 16` gets from `{best}`"
          + judged(rate, RATE_OF_BARE, at_most=False))
    exactly_one = all(count == decided for counts in counted.values() for count, decided in counts)
    print(f"- one command, and so one round trip, a decision: {'reached' if exactly_one else 'MISSED'}")


# The HTTP listener.


def listener(redis, fleet, throttlecrab, rounds, seconds):
    """`POST /v1/throttle` with Redis behind it, beside throttlecrab's `POST /throttle`."""
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
            raise SystemExit(f"{mine.refused} of {mine.decisions} were denied, and none should have been")
        cells.append((mine, behind, wrk(throttlecrab, crab, its, "random", seconds)))
    checks.http_counts_exactly("tidegate on redis", port, "/v1/throttle", tidegate_body, "r2")
    print(f"\n## HTTP, {KEYS:,} keys\n\n| server | decisions/s | its CPU a decision | Redis' |\n| --- | --- | --- | --- |")
    mine, theirs = [cell[0] for cell in cells], [cell[2] for cell in cells]
    print(f"| tidegate on Redis | {median(run.rate for run in mine):,.0f} | {median(run.cpu for run in mine):.2f} us "
          f"| {median(cell[1] for cell in cells):.2f} us |")
    print(f"| throttlecrab-server | {median(run.rate for run in theirs):,.0f} | {median(run.cpu for run in theirs):.2f} us | - |\n")
    ratio = median(one.cpu / other.cpu for one, other in zip(mine, theirs)) * THROTTLECRAB_US / LIMITADOR_US
    print(f"- CPU a decision is {ratio:.3f} of limitador-server's on Redis, scaled by throttlecrab-server"
          + judged(ratio, round(OF_LIMITADOR, 3), at_most=True))


# One who has spent everything.


def abuser(redis, fleet, memory, rounds, seconds):
    """One key that is denied for a month, asked about as fast as it goes."""
    client = Resp(redis.ports[0])
    cells, asked = [], 0
    body = {"path": "/v1/throttle", "json": json.dumps(tidegate_body("abuser", 2, 1))}
    for server in (memory, fleet):
        wrk(server, server.ports[0], body, "random", 1)
    for _ in range(rounds):
        pair = {}
        for server in (memory, fleet):
            before = commands(client)
            pair[server] = wrk(server, server.ports[0], body, "random", seconds)
            if pair[server].refused != pair[server].decisions:
                raise SystemExit(f"{server.name} admitted a key with nothing left")
            asked += commands(client) - before
        cells.append((pair[memory], pair[fleet]))
    client.close()
    print("\n## an abuser\n\n| store | denials/s | CPU a denial |\n| --- | --- | --- |")
    for name, runs in zip(("memory", "Redis"), zip(*cells)):
        print(f"| {name} | {median(run.rate for run in runs):,.0f} | {median(run.cpu for run in runs):.2f} us |")
    ratio = median(ours.cpu / its.cpu for its, ours in cells)
    print(f"\n- CPU a denial is {ratio:.3f} of the memory store's{judged(ratio, OF_MEMORY, at_most=True)}")
    print(f"- commands at Redis for {sum(cell[1].decisions for cell in cells):,} denials: {asked}, target 0: {'MISSED' if asked else 'reached'}")


if __name__ == "__main__":
    main()
