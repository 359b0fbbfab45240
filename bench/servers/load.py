"""Runs the load generators, and parses their reports."""

import csv
import glob
import io
import os
import random
import re
import subprocess
import time

from clients import Resp
from limits import KEYS

LUA = os.path.join(os.path.dirname(__file__), "throttle.lua")
# The LuaJIT for wrk, which bench/setup unpacks.
LUAJIT = os.path.join(os.path.dirname(__file__), "../target/luajit/usr/lib/*")


class Measured:
    """A measurement: the number of decisions per second, and the server's CPU time per decision in
    microseconds."""

    def __init__(self, rate, cpu, decisions, refused=0):
        self.rate, self.cpu, self.decisions, self.refused = rate, cpu, decisions, refused


def redis_benchmark(server, port, words, depth, seconds):
    """Runs `redis-benchmark -c 50` for about `seconds` seconds."""
    trial = _redis_benchmark(port, words, depth, 400 * depth + 10_000)
    requests = int(min(max(trial * seconds, 50_000), 20_000_000))
    before = server.cpu_seconds()
    rate = _redis_benchmark(port, words, depth, requests)
    return Measured(rate, (server.cpu_seconds() - before) / requests * 1e6, requests)


def _redis_benchmark(port, words, depth, requests):
    command = [
        "redis-benchmark",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-c",
        "50",
        "-P",
        str(depth),
        "-n",
        str(requests),
        "-r",
        str(KEYS),
        "--csv",
        *map(str, words),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    rows = [row for row in csv.reader(io.StringIO(done.stdout)) if len(row) > 2]
    if done.returncode != 0 or len(rows) < 2:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return float(rows[-1][1])


def pipelined(server, port, words, depth, seconds):
    """Sends pipelines of `depth` commands for `seconds` seconds. Words may contain zero bytes,
    behind which `redis-benchmark` does not replace the random key. Each reply must be an
    integer."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    keys = random.Random(1).sample(range(KEYS), KEYS)
    commands = [
        Resp.encode(word.replace(b"__rand_int__", b"%012d" % key) for word in words) for key in keys
    ]
    batches = [b"".join(commands[start : start + depth]) for start in range(0, KEYS, depth)]
    client, decisions = Resp(port), 0
    before, began = server.cpu_seconds(), time.monotonic()
    while time.monotonic() < began + seconds:
        batch = batches[decisions // depth % len(batches)]
        client.send(batch)
        decisions += sum(isinstance(client.reply(), int) for _ in range(batch.count(b"EVALSHA")))
    rate = decisions / (time.monotonic() - began)
    client.close()
    return Measured(rate, (server.cpu_seconds() - before) / decisions * 1e6, decisions)


def wrk(server, port, body, mode, seconds):
    """Runs `wrk` with a throttle request. `body` has the path and the JSON, with the placeholder
    KEY for the key."""
    return run_wrk(server, port, body["path"], LUA, [body["json"], KEYS, mode], seconds)


def run_wrk(server, port, path, script, arguments, seconds):
    """Runs `wrk -t2 -c64` with a script and its arguments."""
    command = [
        "wrk",
        "-t2",
        "-c64",
        f"-d{seconds}s",
        "-s",
        script,
        f"http://127.0.0.1:{port}{path}",
        "--",
        *map(str, arguments),
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(glob.glob(LUAJIT))}
    before = server.cpu_seconds()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    used = server.cpu_seconds() - before
    requests = re.search(r"(\d+) requests in", done.stdout)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", done.stdout)
    errors = re.search(r"Socket errors: .*", done.stdout)
    if done.returncode != 0 or not requests or not rate or errors:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    count = int(requests[1])
    return Measured(float(rate[1]), used / count * 1e6, count, int(refused[1]) if refused else 0)
