"""`POST /v1/throttle` beside throttlecrab's `POST /throttle` and hyper alone, under wrk."""

import json
from statistics import median

import checks
from limits import COMES_BACK, ROOM, throttlecrab_body, tidegate_body
from load import wrk
from resp_bench import judged

CPU_OF_THROTTLECRAB = 0.6

# In `unlike` no key comes near its limit either, and costs from 1 to 500 make bodies of as many forms.
LOADS = ("allowed", "denied", "unlike")


class ListenerKind:
    """An HTTP listener, and the bodies that it takes."""

    def __init__(self, server, port, path, body, denies_by_status):
        self.server, self.port, self.path, self.body = server, port, path, body
        self.denies_by_status = denies_by_status

    def request(self, load, cost=1):
        key, numbers = ("hd:KEY", (2, 1)) if load == "denied" else ("ha:KEY", (ROOM, COMES_BACK))
        body = json.dumps(self.body(key, *numbers, "UNITS" if load == "unlike" else cost))
        return {"path": self.path, "json": body.replace('"UNITS"', "UNITS")}

    def denied_body(self, key):
        return self.body(key, 2, 1)


def run(throttlecrab, alone, tidegate, rounds, seconds):
    """Measures in rounds and prints the table. `alone` decides nothing, and so is asked what everybody admits."""
    listeners = [ListenerKind(throttlecrab, throttlecrab.ports[1], "/throttle", throttlecrab_body, False),
             ListenerKind(tidegate, tidegate.ports[1], "/v1/throttle", tidegate_body, True)]
    for listener in listeners:
        checks.http_counts_exactly(listener.server.name, listener.port, listener.path, listener.body, "h1")
        wrk(listener.server, listener.port, listener.request("denied", cost=2), "each", max(seconds, 5))
    turns = [(listener, LOADS) for listener in listeners]
    turns.insert(1, (ListenerKind(alone, alone.ports[0], "/", tidegate_body, False), ("allowed",)))
    cells = {}
    for turn in range(rounds):
        for listener, loads in turns if turn % 2 == 0 else reversed(turns):
            for load in loads:
                measured = wrk(listener.server, listener.port, listener.request(load), "random", seconds)
                check_statuses(listener, load, measured)
                cells.setdefault((load, listener.server.name), []).append(measured)
    for listener in listeners:
        checks.http_load_arrived(listener.server.name, listener.port, listener.path, listener.denied_body)
        checks.http_counts_exactly(listener.server.name, listener.port, listener.path, listener.body, "h2")
    print_tables(cells)


def check_statuses(listener, load, measured):
    """wrk counts the answers that are not 2xx: here that is every denial, or none."""
    expected = measured.decisions if listener.denies_by_status and load == "denied" else 0
    if measured.refused != expected:
        raise SystemExit(f"{listener.server.name} refused {measured.refused} of {measured.decisions} by status in the "
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
        cpu = cpu_ratio(cells[load, "tidegate"], cells[load, "throttlecrab-server"])
        print(f"- {load}: CPU a decision is {cpu:.3f} of throttlecrab-server's"
              + judged(cpu, CPU_OF_THROTTLECRAB, at_most=True))
    alone = cells["allowed", "hyper alone"]
    print(f"- allowed: hyper alone takes {cpu_ratio(alone, cells['allowed', 'throttlecrab-server']):.3f} of "
          f"throttlecrab-server's CPU, and Tidegate {cpu_ratio(cells['allowed', 'tidegate'], alone):.3f} of hyper's alone")


def cpu_ratio(ours, theirs):
    """The median over the rounds."""
    return median(our.cpu / its.cpu for our, its in zip(ours, theirs))
