"""`POST /v1/throttle` beside throttlecrab's `POST /throttle`, under wrk."""

import json
from statistics import median

import checks
from limits import COMES_BACK, ROOM, throttlecrab_body, tidegate_body
from load import wrk
from resp_bench import judged

CPU_OF_THROTTLECRAB = 0.6

# In `unlike` no key comes near its limit either, and costs from 1 to 500 make bodies of as many forms.
LOADS = ("allowed", "denied", "unlike")


class Door:
    """An HTTP door, and the bodies that it takes."""

    def __init__(self, server, port, path, body, denies_by_status):
        self.server, self.port, self.path, self.body = server, port, path, body
        self.denies_by_status = denies_by_status

    def request(self, load, cost=1):
        key, numbers = ("hd:KEY", (2, 1)) if load == "denied" else ("ha:KEY", (ROOM, COMES_BACK))
        body = json.dumps(self.body(key, *numbers, "UNITS" if load == "unlike" else cost))
        return {"path": self.path, "json": body.replace('"UNITS"', "UNITS")}

    def denied_body(self, key):
        return self.body(key, 2, 1)


def run(throttlecrab, tidegate, rounds, seconds):
    """Measures in rounds and prints the table."""
    doors = [Door(throttlecrab, throttlecrab.ports[1], "/throttle", throttlecrab_body, False),
             Door(tidegate, tidegate.ports[1], "/v1/throttle", tidegate_body, True)]
    for door in doors:
        checks.http_counts_exactly(door.server.name, door.port, door.path, door.body, "h1")
        wrk(door.server, door.port, door.request("denied", cost=2), "each", max(seconds, 5))
    cells = {}
    for turn in range(rounds):
        for door in doors if turn % 2 == 0 else reversed(doors):
            for load in LOADS:
                measured = wrk(door.server, door.port, door.request(load), "random", seconds)
                check_statuses(door, load, measured)
                cells.setdefault((load, door.server.name), []).append(measured)
    for door in doors:
        checks.http_load_arrived(door.server.name, door.port, door.path, door.denied_body)
        checks.http_counts_exactly(door.server.name, door.port, door.path, door.body, "h2")
    print_tables(cells)


def check_statuses(door, load, measured):
    """wrk counts the answers that are not 2xx: here that is every denial, or none."""
    expected = measured.decisions if door.denies_by_status and load == "denied" else 0
    if measured.refused != expected:
        raise SystemExit(f"{door.server.name} refused {measured.refused} of {measured.decisions} by status in the "
                         f"{load} load, and should have refused {expected}")


def print_tables(cells):
    print("| load | server | decisions/s | least to most | server CPU a decision |")
    print("| --- | --- | --- | --- | --- |")
    for (load, name), runs in sorted(cells.items()):
        rates = [run.rate for run in runs]
        print(f"| {load} | {name} | {median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
              f"| {median(run.cpu for run in runs):.2f} us |")
    print()
    for load in LOADS:
        pairs = zip(cells[load, "tidegate"], cells[load, "throttlecrab-server"])
        cpu = median(our.cpu / its.cpu for our, its in pairs)
        print(f"- {load}: CPU a decision is {cpu:.3f} of throttlecrab-server's"
              + judged(cpu, CPU_OF_THROTTLECRAB, at_most=True))
