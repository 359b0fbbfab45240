#!/usr/bin/env python3
"""Measures Tidegate's gRPC listener and a tonic service that makes no decisions, with h2load.

Also measures the latency of Envoy with Tidegate, with that service (the echo), and without a rate
limit service, with wrk.

    grpc_bench.py --tidegate target/dist/tidegate --echo bench/target/release/grpc \\
        --envoy target/test-envoy/envoy
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from statistics import median

from load import Measured
from processes import Server, reserve_port
from resp_bench import against_target

# The targets. limitador-server with its memory store needs 17 to 20 us per call (METHOD.md). A
# tonic service that makes no decisions is the lower bound for servers that use tonic.
CPU_OF_ECHO = 1.0
LATENCY_OF_ENVOY = 1.3
# The target is relative to the latency of Envoy with the echo, below which no rate limit service
# can get.
LATENCY_OF_ECHO = 1.05
LISTENERS = {"envoy": ("limited", "baseline", "unlimited"), "application": ("application",)}
APPLICATIONS = {"/": "responds at once", "/working": "responds after 1 ms"}
SITUATIONS = [(path, connections) for path in APPLICATIONS for connections in (1, 8)]
PATH = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"

LIMITS = """\
domain: bench
descriptors:
  - {key: remote_address, rate_limit: {unit: year, requests_per_unit: 4294967295}}
  - {key: generic_key, value: allowed, rate_limit: {unit: year, requests_per_unit: 4294967295}}
  - {key: generic_key, value: denied, rate_limit: {unit: year, requests_per_unit: 10}}
  - {key: generic_key, rate_limit: {unit: year, requests_per_unit: 10}}
"""


def main():
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    rounds, requests, seconds = (1, 5_000, 1) if options.smoke else (5, 200_000, 5)
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        echo = running.enter_context(start_echo(options.echo))
        tidegate = running.enter_context(start_tidegate(options.tidegate, folder))
        print("\n## ShouldRateLimit\n", flush=True)
        calls(options.echo, echo, tidegate, folder, rounds, requests)
        application = running.enter_context(start_envoy(options.envoy, "application", {}, folder))
        upstreams = {"tidegate": tidegate, "echo": echo, "application": application}
        envoy = running.enter_context(start_envoy(options.envoy, "envoy", upstreams, folder))
        print("\n## Envoy\n", flush=True)
        envoy_latency(envoy, rounds, seconds)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("tidegate", "echo", "envoy"):
        parser.add_argument(f"--{name}", required=True, type=os.path.abspath)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="one short round, to show only that the benchmark works",
    )
    return parser.parse_args()


def start_echo(program):
    port = reserve_port()
    return Server("tonic echo", [program, "echo", str(port)], [port])


def start_tidegate(program, folder):
    port = reserve_port()
    limits, config = os.path.join(folder, "bench.yaml"), os.path.join(folder, "tidegate.yaml")
    with open(limits, "w") as file:
        file.write(LIMITS)
    with open(config, "w") as file:
        file.write(
            f"listen: {{http: off, resp: off, admin: off, grpc: '127.0.0.1:{port}'}}\nenvoy: "
            f"{{config: {limits}}}\n"
        )
    return Server("tidegate", [program, "serve", "--config", config], [port])


def calls(client, echo, tidegate, folder, rounds, requests):
    """Measures the server's CPU time per call."""
    counts_exactly(client, tidegate, "before")
    bodies = {}
    for load in ("allowed", "denied"):
        bodies[load] = os.path.join(folder, load)
        subprocess.run([client, "body", bodies[load], load], check=True)
    admitted(client, tidegate, "denied", 20)
    turns = [(echo, "allowed"), (tidegate, "allowed"), (tidegate, "denied")]
    cells = {}
    for turn in range(rounds):
        for server, load in turns if turn % 2 == 0 else reversed(turns):
            cells.setdefault((server.name, load), []).append(h2load(server, bodies[load], requests))
    counts_exactly(client, tidegate, "after")
    if admitted(client, tidegate, "denied", 20) != 0:
        raise SystemExit("tidegate admitted an exhausted key after the load")
    print("| server | load | calls/s | minimum to maximum | server CPU per call |")
    print("| --- | --- | --- | --- | --- |")
    for (name, load), runs in cells.items():
        rates = [run.rate for run in runs]
        print(
            f"| {name} | {load} | {median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {median(run.cpu for run in runs):.2f} us |"
        )
    print()
    for load in ("allowed", "denied"):
        pairs = zip(cells["tidegate", load], cells["tonic echo", "allowed"])
        ratio = median(our.cpu / its.cpu for our, its in pairs)
        print(
            f"- {load}: CPU per call is {ratio:.3f} times the echo's"
            + against_target(ratio, CPU_OF_ECHO, at_most=True)
        )


def admitted(client, server, value, count):
    done = subprocess.run(
        [client, "ask", str(server.ports[0]), value, str(count)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode != 0:
        raise SystemExit(f"calling {server.name} failed:\n{done.stderr}")
    return int(done.stdout)


def counts_exactly(client, server, tag):
    """Checks that 10 of 40 requests are admitted for a key with a limit of 10."""
    for key in range(5):
        passed = admitted(client, server, f"check-{tag}-{key}", 40)
        if passed != 10:
            raise SystemExit(f"{server.name} admitted {passed} of 40 requests, expected 10")


def h2load(server, body, requests):
    command = [
        "h2load",
        "-c",
        "8",
        "-m",
        "8",
        "-n",
        str(requests),
        "-d",
        body,
        "-H",
        "content-type: application/grpc",
        "-H",
        "te: trailers",
        f"http://127.0.0.1:{server.ports[0]}{PATH}",
    ]
    before = server.cpu_seconds()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    used = server.cpu_seconds() - before
    rate = re.search(r"finished in [\d.]+\w+, ([\d.]+) req/s", done.stdout)
    succeeded = re.search(r"(\d+) succeeded", done.stdout)
    if done.returncode != 0 or not rate or not succeeded or int(succeeded[1]) != requests:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return Measured(float(rate[1]), used / requests * 1e6, requests)


def start_envoy(program, name, upstreams, folder):
    """Starts Envoy with the file of this name. `envoy` has three listeners for the application:
    `limited` calls Tidegate for each request, `baseline` calls the echo, and `unlimited` calls no
    service."""
    ports = {listener: reserve_port() for listener in LISTENERS[name]}
    text = pathlib.Path(__file__).with_name(f"{name}.yaml").read_text()
    for place, port in {
        **ports,
        **{upstream: server.ports[0] for upstream, server in upstreams.items()},
    }.items():
        text = text.replace(f"@{place.upper()}@", str(port))
    bootstrap = os.path.join(folder, f"{name}.yaml")
    with open(bootstrap, "w") as file:
        file.write(text)
    return Server(
        name,
        [
            program,
            "-c",
            bootstrap,
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "--log-level",
            "error",
        ],
        list(ports.values()),
    )


def envoy_latency(envoy, rounds, seconds):
    """Measures the median latency of a request through each listener, in rounds."""
    cells = {}
    for turn in range(rounds):
        listeners = list(zip(LISTENERS["envoy"], envoy.ports))
        for path, connections in SITUATIONS:
            for name, port in listeners if turn % 2 == 0 else reversed(listeners):
                measured = wrk_median(port, path, connections, seconds)
                cells.setdefault((path, connections, name), []).append(measured)
    print(
        "| application | connections | Envoy alone | with the echo | with Tidegate "
        "| echo / alone | Tidegate / alone | Tidegate / echo |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for path, connections in SITUATIONS:
        unlimited, baseline, limited = (
            cells[path, connections, name] for name in ("unlimited", "baseline", "limited")
        )
        row = [
            APPLICATIONS[path],
            connections,
            *(f"{median(runs):,.0f} us" for runs in (unlimited, baseline, limited)),
        ]
        row.append(f"{ratio_of(baseline, unlimited):.2f}")
        row += [
            f"{ratio:.2f}{against_target(ratio, most, at_most=True)}"
            for ratio, most in (
                (ratio_of(limited, unlimited), LATENCY_OF_ENVOY),
                (ratio_of(limited, baseline), LATENCY_OF_ECHO),
            )
        ]
        print(f"| {' | '.join(map(str, row))} |")


def ratio_of(these, those):
    """Returns the median of the per-round ratios."""
    return median(one / other for one, other in zip(these, those))


def wrk_median(port, path, connections, seconds):
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--latency",
        f"http://127.0.0.1:{port}{path}",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 60, stdin=subprocess.DEVNULL
    )
    found = re.search(r"50%\s+([\d.]+)(us|ms)", done.stdout)
    if done.returncode != 0 or not found or re.search(r"Socket errors|Non-2xx", done.stdout):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return float(found[1]) * (1000 if found[2] == "ms" else 1)


if __name__ == "__main__":
    main()
