#!/usr/bin/env python3
"""Measures the latency that Tidegate adds to the front ends of examples/, each beside itself alone.

All front ends forward to the same nginx, in one run on loopback. The method is in METHOD.md.

    frontends_bench.py --tidegate target/dist/tidegate --envoy target/test-envoy/envoy \\
        --traefik target/test-traefik/traefik
"""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from statistics import median

from front_ends import FRONT_ENDS, REPOSITORY, Programs, Setting, start_tidegate
from measure import benchmark_parser
from processes import START_SECONDS
from proxy_bench import BODY_BYTES, start_upstream

CONNECTIONS = (1, 16)
# The customer by API key, or by the header that the example trusts.
HEADERS = {"X-Api-Key": "acme-key", "X-Customer": "acme"}
PATH = "/api/orders"
LUA = os.path.join(os.path.dirname(__file__), "latency.lua")
LOGINS = 40
VARIANTS = ("alone", "limited")


class Subject:
    """A front end: its Tidegate server, and its process in each variant."""

    def __init__(self, front_end, tidegate, servers):
        self.front_end, self.tidegate, self.servers = front_end, tidegate, servers


class Counts:
    """The counters of a front end and its Tidegate server: CPU seconds, decisions, connections."""

    def __init__(self, subject, variant):
        page = metrics(subject.tidegate)
        self.decisions = total(page, "tidegate_decisions_total")
        self.connections = total(page, "tidegate_connections_accepted_total")
        self.front_end_cpu = subject.servers[variant].cpu_seconds()
        self.tidegate_cpu = subject.tidegate.cpu_seconds()


class Run:
    """The result of a load: the latencies, and per request the CPU time of the front end and of
    Tidegate, all in microseconds, and the number of new connections to Tidegate."""

    def __init__(self, percentiles, requests, before, after):
        self.median_us, self.p99_us = percentiles
        self.front_end_cpu = (after.front_end_cpu - before.front_end_cpu) / requests * 1e6
        self.tidegate_cpu = (after.tidegate_cpu - before.tidegate_cpu) / requests * 1e6
        self.connections = (after.connections - before.connections) / requests


def main():
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    # On Debian, nginx and HAProxy are in a folder that is only in root's PATH.
    os.environ["PATH"] += ":/usr/sbin"
    rounds, seconds = (1, 1) if options.smoke else (options.rounds, options.seconds)
    programs = Programs(options.tidegate, options.envoy, options.traefik)
    os.chdir(REPOSITORY)
    print_versions(programs)
    cells = {}
    with contextlib.ExitStack() as running:
        subjects = start(running, programs)
        for subject in subjects:
            check(subject, admitted=subject.front_end.logins)
            if not options.smoke:
                for variant in VARIANTS:
                    load(subject, variant, max(CONNECTIONS), 1)
        for turn in range(rounds):
            for subject in subjects:
                measure_round(subject, turn, seconds, cells)
        for subject in subjects:
            check(subject, admitted=0)
    print(f"Load average at the end: {os.getloadavg()[0]:.2f}.\n")
    print_latencies(cells)
    print_cpu(cells)


def parse():
    parser = benchmark_parser(__doc__, ("tidegate", "envoy", "traefik"), rounds=7)
    parser.add_argument("--seconds", type=int, default=3, help="per load")
    return parser.parse_args()


def print_versions(programs):
    """Prints the versions of the front ends."""
    commands = {
        "HAProxy": ["haproxy", "-v"],
        "nginx": ["nginx", "-v"],
        "Caddy": ["caddy", "version"],
        "Traefik": [programs.traefik, "version"],
        "Envoy": [programs.envoy, "--version"],
    }
    versions = []
    for name, command in commands.items():
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        version = re.search(r"\d+\.\d+\.\d+", done.stdout + done.stderr)
        versions.append(f"{name} {version[0]}")
    print(f"{', '.join(versions)}.\n")


def start(running, programs):
    """Starts the upstream, and each front end in both variants with its own Tidegate server."""
    folder = running.enter_context(tempfile.TemporaryDirectory())
    os.chmod(folder, 0o755)  # the workers of nginx run as another user
    upstream = start_upstream(running, folder)
    subjects = []
    for number, front_end in enumerate(FRONT_ENDS):
        tidegate = running.enter_context(start_tidegate(programs, folder, front_end))
        servers = {}
        for variant in VARIANTS:
            own = os.path.join(folder, f"{number}-{variant}")
            os.mkdir(own)
            asked = tidegate if variant == "limited" else None
            setting = Setting(programs, own, upstream, asked)
            servers[variant] = running.enter_context(front_end.start(setting))
            await_forwarding(servers[variant])
        subjects.append(Subject(front_end, tidegate, servers))
    return subjects


def await_forwarding(server):
    """Waits until the front end forwards requests. Traefik listens before it knows its routes."""
    deadline = time.monotonic() + START_SECONDS
    while (status := ask(server, "GET", "/about")) != 200:
        if time.monotonic() > deadline:
            raise SystemExit(f"{' '.join(server.command)} returned {status} for /about")
        time.sleep(0.02)


def ask(server, method, path):
    """Returns the status of a response. The body of a 200 must be that of the upstream."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=10)
    connection.request(method, path, headers=HEADERS)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status == 200 and len(body) != BODY_BYTES:
        raise SystemExit(f"{server.name} did not return the upstream's response: {body[:200]!r}")
    return response.status


def check(subject, admitted):
    """Checks that exactly `admitted` logins pass and the others are denied with 429, and that all
    logins pass without Tidegate."""
    for variant, expected in (("limited", admitted), ("alone", LOGINS)):
        statuses = [ask(subject.servers[variant], "POST", "/login") for _ in range(LOGINS)]
        if sorted(statuses) != [200] * expected + [429] * (LOGINS - expected):
            raise SystemExit(
                f"{subject.front_end.name}, {variant}: expected {expected} of {LOGINS} logins to "
                f"pass, but got {statuses}"
            )


def measure_round(subject, turn, seconds, cells):
    """Runs each load in both variants, in alternating order."""
    for connections in CONNECTIONS:
        for variant in VARIANTS if turn % 2 == 0 else reversed(VARIANTS):
            run = load(subject, variant, connections, seconds)
            cells.setdefault((subject.front_end.name, connections, variant), []).append(run)


def load(subject, variant, connections, seconds):
    """Runs wrk. Every request must return 200, and Tidegate must have decided each of them."""
    server = subject.servers[variant]
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", LUA]
    for name, value in HEADERS.items():
        command += ["-H", f"{name}: {value}"]
    command.append(f"http://127.0.0.1:{server.ports[0]}{PATH}")
    before = Counts(subject, variant)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 60, stdin=subprocess.DEVNULL
    )
    await_last_requests(subject.tidegate)
    after = Counts(subject, variant)
    result = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+)", done.stdout)
    if done.returncode != 0 or not result or int(result[2]) != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    requests, _, *percentiles = map(int, result.groups())
    # When wrk ends, each connection can have one further request in progress.
    least, most = (requests, requests + connections) if variant == "limited" else (0, 0)
    decided = after.decisions - before.decisions
    if not least <= decided <= most:
        raise SystemExit(
            f"{subject.front_end.name}, {variant}: {requests} requests, {decided} decisions"
        )
    return Run(percentiles, requests, before, after)


def await_last_requests(tidegate):
    """Waits until Tidegate has decided the requests that were in progress when wrk ended."""
    decided, before = total(metrics(tidegate), "tidegate_decisions_total"), None
    while decided != before:
        time.sleep(0.2)
        before, decided = decided, total(metrics(tidegate), "tidegate_decisions_total")


def metrics(tidegate):
    """Returns the lines of Tidegate's metrics, without those of the admin listener."""
    url = f"http://127.0.0.1:{tidegate.listeners['admin']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        page = response.read().decode()
    return [line for line in page.splitlines() if 'listener="admin"' not in line]


def total(page, name):
    """Returns the sum of a metric over its labels."""
    return sum(int(line.rsplit(" ", 1)[1]) for line in page if line.startswith(f"{name}{{"))


def print_latencies(cells):
    for connections in CONNECTIONS:
        noun = "connection" if connections == 1 else "connections"
        print(f"## Latency, {connections} {noun}\n")
        print(
            "| front end | median alone | with Tidegate | ratio | added | minimum to maximum "
            "| 99 % alone | with Tidegate |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for front_end in FRONT_ENDS:
            alone, limited = (cells[front_end.name, connections, variant] for variant in VARIANTS)
            added = [ours.median_us - its.median_us for ours, its in zip(limited, alone)]
            ratio = median(ours.median_us / its.median_us for ours, its in zip(limited, alone))
            print(
                f"| {front_end.name} | {of_runs(alone, 'median_us'):,.0f} us "
                f"| {of_runs(limited, 'median_us'):,.0f} us | {ratio:.2f} "
                f"| {median(added):,.0f} us | {min(added):,.0f} to {max(added):,.0f} us "
                f"| {of_runs(alone, 'p99_us'):,.0f} us | {of_runs(limited, 'p99_us'):,.0f} us |"
            )
        print()


def print_cpu(cells):
    print("## CPU time and connections, per request\n")
    print(
        "| front end | connections | alone | with Tidegate | Tidegate's own "
        "| new connections to Tidegate |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for front_end in FRONT_ENDS:
        for connections in CONNECTIONS:
            alone, limited = (cells[front_end.name, connections, variant] for variant in VARIANTS)
            print(
                f"| {front_end.name} | {connections} | {of_runs(alone, 'front_end_cpu'):.1f} us "
                f"| {of_runs(limited, 'front_end_cpu'):.1f} us "
                f"| {of_runs(limited, 'tidegate_cpu'):.1f} us "
                f"| {of_runs(limited, 'connections'):.2f} |"
            )


def of_runs(runs, field):
    """Returns the median of a field over the rounds."""
    return median(getattr(run, field) for run in runs)


if __name__ == "__main__":
    main()
