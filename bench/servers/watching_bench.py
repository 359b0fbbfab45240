"""Measures the CPU time per decision with and without the features that record traffic.

These features are the lists of top talkers, recent denials, and events to a file. Both servers run
at the same time and are measured alternately, so that other load on the machine affects both."""

import argparse
import json
import os
import statistics
import tempfile

from load import redis_benchmark, wrk
from processes import Server, reserve_port

RULES = (
    "rules: [{name: allowed, when: {path: /a}, key: [user], limits: [1000000/min]},"
    " {name: denied, when: {path: /d}, key: [user], limits: [1/d]}]\n"
)
OFF = "top: off\ndenials: off\n"
TARGET = 1.05
DEPTHS = (1, 16, 64)


def start(tidegate, folder, name, settings):
    http, resp = reserve_port(), reserve_port()
    config = os.path.join(folder, f"{name}.yaml")
    with open(config, "w") as file:
        file.write(
            "listen: "
            f"{{http: '127.0.0.1:{http}', grpc: off, resp: '127.0.0.1:{resp}', admin: off}}\n{settings}{RULES}"
        )
    server = Server("tidegate", [tidegate, "serve", "--config", config], [http, resp])
    server.http, server.resp = http, resp
    return server


def loads():
    """Yields the name of each load, and a function that measures it on a server."""
    for load, path in (("admitted", "/a"), ("denied", "/d")):
        words = ["TIDEGATE.CHECK", "path", path, "user", "__rand_int__"]
        for depth in DEPTHS:
            yield (
                f"Redis protocol, pipelines of {depth}, {load}",
                lambda server, seconds, words=words, depth=depth: redis_benchmark(
                    server, server.resp, words, depth, seconds
                ),
            )
        body = {"path": "/v1/check", "json": json.dumps({"entries": {"path": path, "user": "KEY"}})}
        yield (
            f"HTTP, {load}",
            lambda server, seconds, body=body: wrk(
                server, server.http, body, "random", max(1, round(seconds))
            ),
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tidegate", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="one short round, to show only that the benchmark works",
    )
    options = parser.parse_args()
    rounds, seconds = (1, 0.1) if options.smoke else (options.rounds, 2)
    print(
        "| load | CPU µs per decision, off | on | on / off | target 1.05 |\n| --- | --- | --- | "
        "--- | --- |"
    )
    with tempfile.TemporaryDirectory() as folder:
        on = f"events: {{file: {folder}/events.jsonl}}\n"
        with (
            start(options.tidegate, folder, "off", OFF) as off,
            start(options.tidegate, folder, "on", on) as on,
        ):
            for name, measure in loads():
                rows = []
                for turn in range(rounds):
                    pair = [
                        (server, measure(server, seconds).cpu)
                        for server in ((off, on) if turn % 2 else (on, off))
                    ]
                    cpu = dict(pair)
                    rows.append((cpu[off], cpu[on], cpu[on] / cpu[off]))
                without, with_all, ratio = (statistics.median(column) for column in zip(*rows))
                verdict = "reached" if ratio <= TARGET else "missed"
                print(
                    f"| {name} | {without:.2f} | {with_all:.2f} | {ratio:.2f} | {verdict} |",
                    flush=True,
                )
    print(
        "\nMemory store, one rule; medians of rounds in which both servers are measured "
        "alternately."
    )


if __name__ == "__main__":
    main()
