"""Measures the CPU time per TIDEGATE.CHECK with and without candidate rules."""

import argparse
import os
import statistics
import tempfile

from load import redis_benchmark
from processes import Server, reserve_port

RULES = "rules: [{name: api, when: {path: /api/**}, key: [user], limits: [1000000/min]}]\n"
CANDIDATE = RULES.replace("1000000", "900000")
WORDS = ["TIDEGATE.CHECK", "path", "/api/orders", "user", "__rand_int__"]


def measure(tidegate, folder, candidate, depth, seconds):
    port, admin = reserve_port(), reserve_port()
    config = os.path.join(folder, "rules.yaml")
    with open(config, "w") as file:
        file.write(
            "listen: "
            f"{{http: off, grpc: off, resp: '127.0.0.1:{port}', admin: '127.0.0.1:{admin}'}}\n{candidate}{RULES}"
        )
    with Server("tidegate", [tidegate, "serve", "--config", config], [port, admin]) as server:
        return redis_benchmark(server, port, WORDS, depth, seconds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tidegate", required=True)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    rounds, seconds = (1, 0.1) if options.smoke else (5, 3)
    print("| commands per pipeline | CPU µs per decision | with candidate rules | ratio |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "candidate.yaml")
        with open(file, "w") as candidate:
            candidate.write(CANDIDATE)
        for depth in (1, 16):
            rows = []
            for _ in range(rounds):
                without = measure(options.tidegate, folder, "", depth, seconds).cpu
                with_candidate = measure(
                    options.tidegate, folder, f"candidate: {{rules: {file}}}\n", depth, seconds
                ).cpu
                rows.append((without, with_candidate, with_candidate / without))
            without, with_candidate, ratio = (statistics.median(column) for column in zip(*rows))
            print(f"| {depth} | {without:.2f} | {with_candidate:.2f} | {ratio:.2f} |")
    print(
        "\nMemory store, one rule, one candidate rule; medians of the rounds. Target: at most 1.6."
    )


if __name__ == "__main__":
    main()
