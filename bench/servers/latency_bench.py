"""Measures the latency of pipelines with many depths, and the time from the start to the first
response."""

import http.client
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from clients import Resp
from limits import Throttle, under_load
from processes import reserve_port

STALL = 0.030  # seconds; Nagle's algorithm with a delayed acknowledgement stalls for 40 ms
START_TARGET = 0.100


def stalls(server, depths, repeats):
    """Sends pipelines in one piece, and in two pieces that split a command. Measures the time until
    the last reply, and returns whether pipelines stalled."""
    rows = []
    for depth in depths:
        for shape in ("one piece", "two pieces"):
            times = pipeline_times(server.ports[0], depth, shape, repeats)
            rows.append(
                (depth, shape, median(times), max(times), sum(took > STALL for took in times))
            )
    worst = max(rows, key=lambda row: row[3])
    stalled = [row for row in rows if row[4] > 1]
    print(
        f"- {server.name}, depths {min(depths)} to {max(depths)}, {repeats} pipelines each, in "
        "one and two pieces: "
        f"longest wait {worst[3] * 1e3:.1f} ms (depth {worst[0]}, {worst[1]}), "
        f"largest median {max(row[2] for row in rows) * 1e3:.2f} ms, "
        f"pipelines that took over {STALL * 1e3:.0f} ms: {sum(row[4] for row in rows)}"
    )
    return bool(stalled)


def pipeline_times(port, depth, shape, repeats):
    client = Resp(port)
    commands = [
        client.encode(under_load(Throttle, "allowed", f"{key:012}")) for key in range(depth)
    ]
    whole = b"".join(commands)
    middle = len(whole) // 2
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        if shape == "one piece":
            client.send(whole)
        else:
            client.send(whole[:middle])
            client.send(whole[middle:])
        for _ in range(depth):
            client.reply()
        times.append(time.perf_counter() - start)
    client.close()
    return times


def first_response(program, repeats):
    """Measures the time from `exec` of `tidegate serve` to the first decision over HTTP."""
    times = sorted(start_once(program) for _ in range(repeats))
    reached = "reached" if median(times) <= START_TARGET else "MISSED"
    print(
        f"- start to first response, {repeats} starts: median {median(times) * 1e3:.1f} ms, "
        f"maximum {times[-1] * 1e3:.1f} ms, target 100 ms: {reached}"
    )


def start_once(program):
    http_port, resp_port, admin_port = reserve_port(), reserve_port(), reserve_port()
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "tidegate.yaml")
        with open(config, "w") as file:
            file.write(configuration(http_port, resp_port, admin_port))
        start = time.perf_counter()
        process = subprocess.Popen(
            [program, "serve", "--config", config],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not responds(http_port):
                if process.poll() is not None or time.perf_counter() - start > 10:
                    raise SystemExit(f"{program} serve did not respond")
                time.sleep(0.0005)
            return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()


def responds(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        body = '{"key": "first", "algorithm": "gcra", "rate": "1/s"}'
        connection.request("POST", "/v1/throttle", body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except ConnectionError:
        return False
    finally:
        connection.close()


def configuration(http_port, resp_port, admin_port):
    """Returns a rules file with listeners on these ports."""
    return (
        f"listen:\n  http: 127.0.0.1:{http_port}\n  resp: 127.0.0.1:{resp_port}\n"
        f"  admin: 127.0.0.1:{admin_port}\n  grpc: off\n"
    )


def run(throttlecrab, tidegate, repeats):
    """Measures Tidegate at every depth, and throttlecrab, which stalls, at three depths, to show
    that the benchmark detects stalls."""
    stalled = stalls(tidegate, range(1, 65), repeats)
    stalls(throttlecrab, (1, 2, 16), max(repeats // 3, 2))
    print(f"- no stall at any depth: {'MISSED' if stalled else 'reached'}")
    first_response(tidegate.command[0], max(repeats // 2, 5))
    sys.stdout.flush()
