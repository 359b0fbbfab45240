"""Measures `POST /v1/throttle`, throttlecrab's `POST /throttle`, and hyper alone, with wrk."""

import json
from statistics import median

import checks
from limits import AMPLE_CAPACITY, AMPLE_COUNT, throttlecrab_body, tidegate_body
from load import wrk
from resp_bench import against_target

CPU_OF_THROTTLECRAB = 0.6

# `varied` is the same as `allowed`, but with costs from 1 to 500, so that not only the keys in the
# bodies differ.
LOADS = ("allowed", "denied", "varied")


class ListenerKind:
    """An HTTP listener and the form of its requests."""

    def __init__(self, server, port, path, body, denies_by_status):
        self.server, self.port, self.path, self.body = server, port, path, body
        self.denies_by_status = denies_by_status

    def request(self, load, cost=1):
        key, numbers = (
            ("hd:KEY", (2, 1)) if load == "denied" else ("ha:KEY", (AMPLE_CAPACITY, AMPLE_COUNT))
        )
        body = json.dumps(self.body(key, *numbers, "UNITS" if load == "varied" else cost))
        return {"path": self.path, "json": body.replace('"UNITS"', "UNITS")}

    def denied_body(self, key):
        return self.body(key, 2, 1)


def run(throttlecrab, alone, tidegate, rounds, seconds):
    """Measures in rounds, and prints the table. `alone` makes no decisions, so it gets only
    the load `allowed`."""
    listeners = [
        ListenerKind(throttlecrab, throttlecrab.ports[1], "/throttle", throttlecrab_body, False),
        ListenerKind(tidegate, tidegate.ports[1], "/v1/throttle", tidegate_body, True),
    ]
    for listener in listeners:
        checks.http_counts_exactly(
            listener.server.name, listener.port, listener.path, listener.body, "h1"
        )
        wrk(
            listener.server,
            listener.port,
            listener.request("denied", cost=2),
            "each",
            max(seconds, 5),
        )
    turns = [(listener, LOADS) for listener in listeners]
    turns.insert(1, (ListenerKind(alone, alone.ports[0], "/", tidegate_body, False), ("allowed",)))
    cells = {}
    for turn in range(rounds):
        for listener, loads in turns if turn % 2 == 0 else reversed(turns):
            for load in loads:
                measured = wrk(
                    listener.server, listener.port, listener.request(load), "random", seconds
                )
                check_statuses(listener, load, measured)
                cells.setdefault((load, listener.server.name), []).append(measured)
    for listener in listeners:
        checks.http_load_arrived(
            listener.server.name, listener.port, listener.path, listener.denied_body
        )
        checks.http_counts_exactly(
            listener.server.name, listener.port, listener.path, listener.body, "h2"
        )
    print_tables(cells)


def check_statuses(listener, load, measured):
    """Checks the number of responses without a 2xx status, as counted by wrk. If the listener
    denies by status, each response of the load `denied` has another status."""
    expected = measured.decisions if listener.denies_by_status and load == "denied" else 0
    if measured.refused != expected:
        raise SystemExit(
            f"{listener.server.name} denied {measured.refused} of {measured.decisions} requests "
            "by status "
            f"in the load {load}, expected {expected}"
        )


def print_tables(cells):
    print("| load | server | decisions/s | minimum to maximum | server CPU per decision |")
    print("| --- | --- | --- | --- | --- |")
    for (load, name), runs in sorted(cells.items()):
        rates = [run.rate for run in runs]
        print(
            f"| {load} | {name} | {median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {median(run.cpu for run in runs):.2f} us |"
        )
    print()
    for load in LOADS:
        cpu = cpu_ratio(cells[load, "tidegate"], cells[load, "throttlecrab-server"])
        print(
            f"- {load}: CPU per decision is {cpu:.3f} times throttlecrab-server's"
            + against_target(cpu, CPU_OF_THROTTLECRAB, at_most=True)
        )
    alone = cells["allowed", "hyper alone"]
    print(
        "- allowed: hyper alone takes "
        f"{cpu_ratio(alone, cells['allowed', 'throttlecrab-server']):.3f} times "
        "throttlecrab-server's CPU; Tidegate takes "
        f"{cpu_ratio(cells['allowed', 'tidegate'], alone):.3f} times hyper's"
    )


def cpu_ratio(ours, theirs):
    """Returns the median of the per-round ratios of CPU times."""
    return median(our.cpu / its.cpu for our, its in zip(ours, theirs))
