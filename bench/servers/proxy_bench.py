#!/usr/bin/env python3
"""Compares Tidegate's reverse proxy with nginx (`limit_req`) and pingora-proxy.

All three forward to the same nginx, in one run on loopback. The method is in METHOD.md.

    proxy_bench.py --tidegate target/dist/tidegate --pingora bench/target/release/pingora
"""

import contextlib
import os
import re
import subprocess
import tempfile
import urllib.error
import urllib.request
from statistics import median

from measure import benchmark_parser
from processes import Server, reserve_port

BODY_BYTES = 1024
CONNECTIONS = 64

# The load does not reach this limit, so every request is counted and admitted.
AMPLE_RATE = 1_000_000  # per second
# The limit of the path `/checked`, which shows that the proxy limits requests.
CHECKED_LIMIT = 5


class Proxy:
    """A proxy's process and port."""

    def __init__(self, server, port):
        self.server, self.port = server, port


def main():
    options = parse()
    rounds, seconds = (1, 1) if options.smoke else (options.rounds, 4)
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        upstream = start_upstream(running, folder)
        proxies = [
            start_nginx(running, folder, upstream),
            start_tidegate(running, folder, options.tidegate, upstream),
            start_pingora(running, options.pingora, upstream),
        ]
        print(f"\n## 1 KiB, keep-alive, wrk -t1 -c{CONNECTIONS}\n", flush=True)
        for proxy in proxies:
            check_limits(proxy)
            load(proxy, 1)
        cells = {proxy.server.name: [] for proxy in proxies}
        for turn in range(rounds):
            for proxy in proxies if turn % 2 == 0 else reversed(proxies):
                cells[proxy.server.name].append(load(proxy, seconds))
        print_table(cells)


def parse():
    return benchmark_parser(__doc__, ("tidegate", "pingora"), rounds=7).parse_args()


def start_upstream(running, folder):
    port = reserve_port()
    location = f'location / {{ default_type text/plain; return 200 "{"x" * BODY_BYTES}"; }}'
    nginx(running, folder, "upstream", port, f"server {{ listen 127.0.0.1:{port}; {location} }}")
    return port


def start_nginx(running, folder, upstream):
    """Uses the settings in nginx's documentation: per-address limits in shared memory, and
    keep-alive connections to the upstream."""
    port = reserve_port()
    http = f"""
        limit_req_zone $binary_remote_addr zone=room:10m rate={AMPLE_RATE}r/s;
        limit_req_zone $binary_remote_addr zone=checked:10m rate=1r/m;
        limit_req_status 429;
        upstream app {{ server 127.0.0.1:{upstream}; keepalive {CONNECTIONS}; keepalive_requests 1000000000; }}
        server {{
            listen 127.0.0.1:{port};
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_set_header X-Forwarded-For $remote_addr;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Forwarded-Host $http_host;
            location / {{ limit_req zone=room burst={AMPLE_RATE} nodelay; proxy_pass http://app; }}
            location /checked {{ limit_req zone=checked burst={CHECKED_LIMIT - 1} nodelay; proxy_pass http://app; }}
        }}"""
    return Proxy(nginx(running, folder, "nginx limit_req", port, http), port)


def nginx(running, folder, name, port, http):
    """Starts nginx with one worker process per core."""
    config = os.path.join(folder, f"{port}.conf")
    with open(config, "w") as file:
        file.write(f"""
            daemon off; master_process on; worker_processes auto; pid {folder}/{port}.pid; error_log stderr error;
            events {{ worker_connections 4096; }}
            http {{ access_log off; keepalive_requests 1000000000; {http} }}""")
    return running.enter_context(Nginx(name, ["nginx", "-p", folder, "-c", config], [port]))


class Nginx(Server):
    def cpu_seconds(self):
        """Returns the workers' CPU time. The master process is idle during the load."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(children) as file:
            return sum(cpu_of(pid) for pid in file.read().split())


def cpu_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_tidegate(running, folder, path, upstream):
    port = reserve_port()
    config = os.path.join(folder, "tidegate.yaml")
    with open(config, "w") as file:
        file.write(f"""
listen: {{http: off, grpc: off, resp: off, admin: off}}
proxy: {{listen: "127.0.0.1:{port}", upstreams: [{{name: app, urls: "http://127.0.0.1:{upstream}"}}]}}
headers: {{ratelimit: false}}
rules:
  - name: room
    when: {{path: {{not: /checked}}}}
    key: [ip]
    limits: [{{algorithm: gcra, rate: {AMPLE_RATE}/s, burst: {AMPLE_RATE}}}]
  - name: checked
    when: {{path: /checked}}
    key: [ip]
    limits: [{{algorithm: gcra, rate: 1/min, burst: {CHECKED_LIMIT - 1}}}]
""")
    command = [path, "serve", "--config", config, "--log", "error"]
    return Proxy(running.enter_context(Server("tidegate", command, [port])), port)


def start_pingora(running, path, upstream):
    port = reserve_port()
    command = [path, str(port), str(upstream), str(os.cpu_count())]
    return Proxy(running.enter_context(Server("pingora-proxy", command, [port])), port)


def check_limits(proxy):
    """Checks that five requests get the upstream's response, and that the sixth is denied."""
    responses = [get(proxy, "/checked") for _ in range(CHECKED_LIMIT + 1)]
    passed = [(status, size) for status, size in responses if status == 200]
    if passed != [(200, BODY_BYTES)] * CHECKED_LIMIT or responses[-1][0] != 429:
        raise SystemExit(
            f"{proxy.server.name} should have admitted {CHECKED_LIMIT}, but returned {responses}"
        )


def get(proxy, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}{path}", timeout=10) as response:
            return response.status, len(response.read())
    except urllib.error.HTTPError as error:
        return error.code, None


def load(proxy, seconds):
    """Returns requests per second, and the proxy's CPU time per request in microseconds."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", f"http://127.0.0.1:{proxy.port}/"]
    before = proxy.server.cpu_seconds()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 60, stdin=subprocess.DEVNULL
    )
    used = proxy.server.cpu_seconds() - before
    requests = re.search(r"(\d+) requests in .*, ([\d.]+)(\w+) read", done.stdout)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    wrong = re.search(r"Non-2xx or 3xx responses: .*|Socket errors: .*", done.stdout)
    if done.returncode != 0 or not requests or not rate or wrong:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return float(rate[1]), used / int(requests[1]) * 1e6


def print_table(cells):
    print("| proxy | requests/s | minimum to maximum | proxy CPU per request |")
    print("| --- | --- | --- | --- |")
    for name, runs in cells.items():
        rates = [rate for rate, _ in runs]
        print(
            f"| {name} | {median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {median(cpu for _, cpu in runs):.2f} us |"
        )
    pairs = list(zip(cells["tidegate"], cells["nginx limit_req"]))
    rate = median(ours[0] / its[0] for ours, its in pairs)
    cpu = median(ours[1] / its[1] for ours, its in pairs)
    print(
        f"\n- requests per second: {rate:.3f} times nginx's, target at least 1: "
        f"{'reached' if rate >= 1 else 'MISSED'}"
    )
    print(
        f"- CPU per request: {cpu:.3f} times nginx's, target at most 1: "
        f"{'reached' if cpu <= 1 else 'MISSED'}"
    )
    cpu = median(ours[1] / its[1] for ours, its in zip(cells["tidegate"], cells["pingora-proxy"]))
    print(f"- CPU per request: {cpu:.3f} times pingora-proxy's")


if __name__ == "__main__":
    main()
