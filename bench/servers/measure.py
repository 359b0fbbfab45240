#!/usr/bin/env python3
"""Compares Tidegate's server with redis-server and throttlecrab-server, in one run on loopback.

The method is in METHOD.md.

    measure.py --tidegate target/dist/tidegate --hyper bench/target/release/hyper-alone \
        --throttlecrab bench/target/peers/bin/throttlecrab-server
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile

import http_bench
import latency_bench
import resp_bench
from processes import Server, reserve_port

PARTS = ("latency", "resp", "http")


def main():
    options = parse()
    # Exiting with an exception closes the context managers, which stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    rounds, seconds, repeats = (1, 1, 3) if options.smoke else (options.rounds, 3, 30)
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        tidegate = running.enter_context(start_tidegate(options.tidegate, folder))
        throttlecrab = running.enter_context(start_throttlecrab(options.throttlecrab))
        redis = running.enter_context(start_redis(folder))
        hyper = running.enter_context(start_hyper(options.hyper))
        for part in options.parts or PARTS:
            print(f"\n## {part}\n", flush=True)
            if part == "latency":
                latency_bench.run(throttlecrab, tidegate, repeats)
            elif part == "resp":
                resp_bench.run(redis, throttlecrab, tidegate, rounds, seconds)
            else:
                http_bench.run(throttlecrab, hyper, tidegate, rounds, seconds)


def parse():
    parser = benchmark_parser(__doc__, ("tidegate", "throttlecrab", "hyper"), rounds=5)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    return parser.parse_args()


def benchmark_parser(description, programs, rounds):
    """Returns a parser with the options that most benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in programs:
        parser.add_argument(f"--{name}", required=True, type=program)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="one short round, to show only that the benchmark works",
    )
    return parser


def program(path):
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} is not a program; build it with bench/run")
    return os.path.abspath(path)


def start_tidegate(path, folder):
    resp, http, admin = reserve_port(), reserve_port(), reserve_port()
    config = os.path.join(folder, "tidegate.yaml")
    with open(config, "w") as file:
        file.write(latency_bench.configuration(http, resp, admin))
    return Server("tidegate", [path, "serve", "--config", config], [resp, http])


def start_throttlecrab(path):
    """Uses the periodic store. Above 172,000 keys, the default store sweeps on every write."""
    resp, http = reserve_port(), reserve_port()
    return Server(
        "throttlecrab-server",
        [
            path,
            "--redis",
            "--redis-host",
            "127.0.0.1",
            "--redis-port",
            str(resp),
            "--http",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(http),
            "--store",
            "periodic",
            "--store-capacity",
            "1000000",
            "--store-cleanup-interval",
            "3600",
            "--max-denied-keys",
            "0",
            "--log-level",
            "error",
        ],
        [resp, http],
    )


def start_hyper(path):
    port = reserve_port()
    return Server("hyper alone", [path, str(port)], [port])


def start_redis(folder):
    port = reserve_port()
    return Server(
        "redis-server",
        [
            "redis-server",
            "--bind",
            "127.0.0.1",
            "--port",
            str(port),
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            folder,
        ],
        [port],
    )


if __name__ == "__main__":
    main()
