"""Measures Redis protocol listeners and redis-server's `PING`, with redis-benchmark."""

from statistics import median

import checks
from limits import ClThrottle, Throttle, under_load
from load import redis_benchmark

DEPTHS = (1, 16, 64)

# The published throughput of the redis-cell module, relative to the throughput of PING on
# redis-server in the same measurement.
REDIS_CELL = {
    16: {"allowed": 258_000 / 1_620_000, "denied": 258_000 / 1_620_000},
    64: {"allowed": 278_000 / 3_150_000, "denied": 641_000 / 3_150_000},
}
TIMES_REDIS_CELL = 3
CPU_OF_THROTTLECRAB = {1: 0.8, 16: None, 64: 1 / 8}


class Contender:
    """A command on a server."""

    def __init__(self, server, port, command=None):
        self.server, self.port, self.command = server, port, command
        self.name = f"{server.name} {command.name if command else 'PING'}"

    def words(self, load):
        return under_load(self.command, load, "__rand_int__") if self.command else ["PING"]

    def loads(self):
        return ("allowed", "denied") if self.command else ("-",)


def run(redis, throttlecrab, tidegate, rounds, seconds):
    """Measures all contenders in each round, and prints the tables."""
    contenders = [
        Contender(redis, redis.ports[0]),
        Contender(throttlecrab, throttlecrab.ports[0], Throttle),
        Contender(tidegate, tidegate.ports[0], Throttle),
        Contender(tidegate, tidegate.ports[0], ClThrottle),
    ]
    limiting = [contender for contender in contenders if contender.command]
    for contender in limiting:
        checks.resp_counts_exactly(
            contender.server.name, contender.port, contender.command, f"{contender.command.prefix}1"
        )
        checks.resp_spend(contender.server.name, contender.port, contender.command)
    cells = {}
    for turn in range(rounds):
        for depth in DEPTHS:
            for contender in (
                contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]
            ):
                for load in contender.loads():
                    cells.setdefault((depth, load, contender.name), []).append(
                        redis_benchmark(
                            contender.server, contender.port, contender.words(load), depth, seconds
                        )
                    )
    for contender in limiting:
        checks.resp_load_arrived(contender.server.name, contender.port, contender.command)
        checks.resp_counts_exactly(
            contender.server.name, contender.port, contender.command, f"{contender.command.prefix}2"
        )
    print_tables(cells)


def print_tables(cells):
    print(
        "| -P | load | server and command | decisions/s | minimum to maximum | server CPU per "
        "decision |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for (depth, load, name), runs in sorted(cells.items()):
        rates = [run.rate for run in runs]
        print(
            f"| {depth} | {load} | {name} | {median(rates):,.0f} | {min(rates):,.0f} to "
            f"{max(rates):,.0f} "
            f"| {median(run.cpu for run in runs):.2f} us |"
        )
    print()
    for depth in DEPTHS:
        for load in ("allowed", "denied"):
            print_ratios(cells, depth, load)


def print_ratios(cells, depth, load):
    """Prints the medians of the per-round ratios, and compares them with the targets."""
    peer = cells[depth, load, "throttlecrab-server THROTTLE"]
    ping = cells[depth, "-", "redis-server PING"]
    for command in ("THROTTLE", "CL.THROTTLE"):
        ours = cells[depth, load, f"tidegate {command}"]
        cpu = median(our.cpu / its.cpu for our, its in zip(ours, peer))
        where = f"-P {depth}, {load}, {command}"
        print(
            f"- {where}: CPU per decision is {cpu:.3f} times throttlecrab-server's"
            + against_target(cpu, CPU_OF_THROTTLECRAB[depth], at_most=True)
        )
        if depth in REDIS_CELL:
            scaled = (
                median(our.rate / its.rate for our, its in zip(ours, ping))
                / REDIS_CELL[depth][load]
            )
            print(
                f"- {where}: throughput is {scaled:.2f} times redis-cell's, scaled by PING"
                + against_target(scaled, TIMES_REDIS_CELL, at_most=False)
            )


def against_target(value, target, at_most):
    if target is None:
        return ""
    reached = value <= target if at_most else value >= target
    return f", target {'at most' if at_most else 'at least'} {target:g}: {'reached' if reached else 'MISSED'}"
