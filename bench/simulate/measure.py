"""Compares `tidegate simulate` with goaccess, on a generated log in the combined format."""

import argparse
import bisect
import itertools
import os
import random
import statistics
import subprocess
import tempfile
import time

RULES = """\
rules:
  - {name: login, when: {path: {route: /login}}, key: [ip], limits: [5/min]}
  - {name: api, when: {path: /api/**}, key: [ip], limits: [60/min]}
  - {name: all, key: [ip], limits: [600/min]}
"""
CLIENTS = 100_000
START = 1_795_240_800
DAY = 86_400
PATHS = [
    "/",
    "/login",
    "/api/orders",
    "/api/products/%d",
    "/static/app.js",
    "/search?q=%d",
    "/images/%d.png",
    "/about",
]
AGENTS = [
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/131.0 "
    "Safari/537.36",
    "curl/8.5.0",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15 Version/18.0 "
    "Mobile Safari/604.1",
    "Googlebot/2.1 (+http://www.google.com/bot.html)",
]


def write_log(path, lines):
    """Writes the requests of one day. The clients follow a Zipf distribution with the exponent 0.9."""
    draw = random.Random(1)
    clients = [".".join(str(draw.randint(1, 223)) for _ in range(4)) for _ in range(CLIENTS)]
    weights = list(itertools.accumulate((rank + 1) ** -0.9 for rank in range(CLIENTS)))
    with open(path, "w") as log:
        second, stamp = None, None
        for number in range(lines):
            now = START + number * DAY // lines
            if now != second:
                second, stamp = now, time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime(now))
            client = clients[bisect.bisect(weights, draw.random() * weights[-1])]
            target = draw.choice(PATHS)
            if "%d" in target:
                target %= draw.randint(1, 5_000)
            status, size = draw.choice((200, 200, 200, 304, 404)), draw.randint(100, 50_000)
            log.write(
                f'{client} - - [{stamp}] "GET {target} HTTP/1.1" {status} {size} "-" "{draw.choice(AGENTS)}"\n'
            )


def run(command):
    """Returns the elapsed seconds, the CPU seconds and the peak memory in MiB."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tidegate", required=True)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    lines, rounds = (10_000, 1) if options.smoke else (10_000_000, 3)
    with tempfile.TemporaryDirectory() as folder:
        log, rules = os.path.join(folder, "access.log"), os.path.join(folder, "rules.yaml")
        write_log(log, lines)
        with open(rules, "w") as file:
            file.write(RULES)
        commands = {
            "tidegate simulate": [options.tidegate, "simulate", rules, "--log", log],
            "goaccess": [
                "goaccess",
                log,
                "--log-format=COMBINED",
                "--no-progress",
                "-o",
                os.path.join(folder, "report.json"),
            ],
        }
        measured = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                measured[name].append(run(command))
        print(
            f"{lines:,} lines of {os.path.getsize(log) / lines:.0f} bytes from {CLIENTS:,} "
            f"clients, medians of {rounds} rounds.\n"
        )
    print("| program | seconds | CPU seconds | million lines per second | peak memory, MiB |")
    print("| --- | --- | --- | --- | --- |")
    medians = {
        name: [statistics.median(column) for column in zip(*rows)]
        for name, rows in measured.items()
    }
    for name, (seconds, cpu, memory) in medians.items():
        print(
            f"| {name} | {seconds:.1f} | {cpu:.1f} | {lines / seconds / 1e6:.3f} | {memory:.0f} |"
        )
    (ours, ours_cpu, ours_memory), (theirs, theirs_cpu, theirs_memory) = medians.values()
    print(
        f"\n`tidegate simulate` takes {ours / theirs:.2f} times the elapsed time, "
        f"{ours_cpu / theirs_cpu:.2f} times the CPU time and "
        f"{ours_memory / theirs_memory:.2f} times the memory of goaccess. goaccess counts "
        "visitors, pages and browsers, and `tidegate simulate` evaluates three rules."
    )


if __name__ == "__main__":
    main()
