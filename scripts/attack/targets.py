"""The targets: a Tidegate server, and the upstream of its proxy, which records the received
requests."""

import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
import threading
import time

SECRETS = [b"s3cr3t-t0k3n-of-the-attack-suite"]

RULES = """
listen:
  http: {{address: '127.0.0.1:0', {http_bounds}, idle_timeout: {idle_timeout}{http}}}
  grpc: {{address: '127.0.0.1:0', {grpc_bounds}, idle_timeout: {idle_timeout}}}
  resp: {{address: '127.0.0.1:0', {resp_bounds}, idle_timeout: {idle_timeout}{resp}}}
  admin: '127.0.0.1:0'
{admin}
rules:
  - {{name: denied, when: {{path: /denied/**}}, limits: [{{algorithm: fixed_window, limit: 0, window: 1h}}]}}
  - {{name: keyed, key: [header.x-api-key], limits: [{{algorithm: fixed_window, limit: 3, window: 1d}}]}}
  - {{name: pages, when: {{path: /pages/a}}, key: [header.x-case], limits: [{{algorithm: fixed_window, limit: 3, window: 1d}}]}}
  - {{name: per-path, when: {{path: /items/**}}, key: [path], limits: [{{algorithm: fixed_window, limit: 3, window: 1d}}]}}
  - {{name: login, when: {{path: {{route: /login}}}}, key: [header.x-case], limits: [{{algorithm: fixed_window, limit: 3, window: 1d}}]}}
  - {{name: sessions, key: [cookie.sid], limits: [{{algorithm: fixed_window, limit: 3, window: 1d}}]}}
proxy: {{listen: '127.0.0.1:0', {proxy_bounds}, timeouts: {{request_head: 5s, head: 3s, idle: 5s, keep_alive: 5s}},
  upstreams: [{{name: app, urls: 'http://127.0.0.1:{port}', eject: off, max_connections: {pool}}}]}}
"""


class Server:
    """A server on free ports.

    `guarded`: the listeners require tokens and a password. `files`: the hard limit of open files.
    `idle`: the name of a listener and the maximum of its connections, of which each client may open
    1,000."""

    def __init__(self, binary, upstream, guarded=False, files=None, idle=None):
        self.folder = tempfile.TemporaryDirectory(prefix="tidegate-attack-")
        secret = SECRETS[0].decode()
        most = {"http": (200, 100), "grpc": (200, 100), "resp": (200, 100), "proxy": (400, 350)}
        if idle:
            most[idle[0]] = (idle[1], 1_000)
        bounds = {
            f"{name}_bounds": f"max_connections: {total}, max_connections_per_client: {each}"
            for name, (total, each) in most.items()
        }
        config = RULES.format(
            port=upstream.port,
            pool=64 if files or idle else 1024,
            idle_timeout="5min" if idle else "5s",
            **bounds,
            http=f", token: '{secret}'" if guarded else "",
            resp=f", password: '{secret}'" if guarded else "",
            admin=f"admin: {{token: '{secret}'}}" if guarded else "",
        )
        with open(os.path.join(self.folder.name, "rules.yaml"), "w", encoding="utf-8") as file:
            file.write(config)
        self.log = os.path.join(self.folder.name, "log")
        # The server raises its soft limit to the hard limit.
        hard = files or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1_024), hard))
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [os.path.abspath(binary), "serve", "--config", "rules.yaml"],
                cwd=self.folder.name,
                stderr=log,
                preexec_fn=limit,
                env={**os.environ, "TIDEGATE_LOG": "info", "NO_COLOR": "1"},
            )
        for _ in range(200):
            time.sleep(0.05)
            ports = dict(
                re.findall(r'listener="(\w+)" address=127\.0\.0\.1:(\d+)', self.log_text())
            )
            if len(ports) == 5:
                break
        else:
            raise OSError("the server did not start:\n" + self.log_text())
        self.http, self.grpc, self.resp, self.admin, self.proxy = (
            ("127.0.0.1", int(ports[listener]))
            for listener in ("http", "grpc", "resp", "admin", "proxy")
        )

    def log_text(self):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return log.read()

    def log_lines(self):
        return self.log_text().count("\n")

    def memory(self):
        """The server's resident memory in MiB."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) // 1_024

    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def panics(self):
        """The number of panics. An exit of the server counts as one."""
        return self.log_text().count("panicked at") + (self.process.poll() is not None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.folder.cleanup()


# More data than fits in the proxy's buffers and the socket buffers.
LARGE = b"x" * (8 << 20)


class Upstream:
    """A server that parses requests strictly as HTTP/1.1, responds to each, and keeps their
    heads."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self.socket.getsockname()[1]
        self.lock, self.seen, self.responses = threading.Lock(), [], []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        data = b""
        client.settimeout(30)
        try:
            while True:
                while b"\r\n\r\n" not in data:
                    more = client.recv(65536)
                    if not more:
                        return
                    data += more
                head, data = data.split(b"\r\n\r\n", 1)
                with self.lock:
                    self.seen.append(head)
                path = head.split(b" ", 2)[1]
                if path.startswith(b"/answers/"):
                    response = self.responses[int(path[9:])]
                    client.sendall(response)
                    # Surplus bytes are sent with an open connection, where a client may parse them
                    # as the next response.
                    if b"INJECTED" not in response:
                        return
                    continue
                if path == b"/early":
                    # Respond before the request body has been read.
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    continue
                data = self.read_body(client, head, data)
                body = LARGE if path == b"/large" else b"ok"
                client.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:2]
                )
                # A slice of `body` would be a copy for each of hundreds of clients.
                client.sendall(memoryview(body)[2:])
        except (OSError, ValueError):
            pass
        finally:
            client.close()

    def read_body(self, client, head, data):
        lines = head.lower().split(b"\r\n")
        if any(line.startswith(b"transfer-encoding:") for line in lines):
            while True:
                while b"\r\n" not in data:
                    data += receive(client)
                size, data = data.split(b"\r\n", 1)
                size = int(size.split(b";")[0], 16)
                while len(data) < size + 2:
                    data += receive(client)
                data = data[size + 2 :]
                if size == 0:
                    return data
        length = sum(
            int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")
        )
        while len(data) < length:
            data += receive(client)
        return data[length:]

    def forget(self):
        with self.lock:
            self.seen = []

    def heads(self):
        with self.lock:
            return list(self.seen)

    def lines(self):
        return [head.split(b"\r\n", 1)[0] for head in self.heads()]

    def with_key(self, key):
        """The number of requests that an application would attribute to `key`. It ignores the case
        of names, reads `_` as `-`, and trims values."""
        found = 0
        for head in self.heads():
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if (
                    name.strip().lower().replace(b"_", b"-") == b"x-api-key"
                    and value.strip(b" \t") == key
                ):
                    found += 1
                    break
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


def receive(client):
    more = client.recv(65536)
    if not more:
        raise ValueError("closed")
    return more


def exchange(address, data, wait, enough=None, client=None, source="127.0.0.1"):
    """Sends `data`, and returns the received bytes. Stops when the peer closes the connection, when
    `enough` has been received, or when no data arrives for `wait` seconds."""
    received = b""
    try:
        client = client or socket.create_connection(address, timeout=10, source_address=(source, 0))
        with client:
            client.settimeout(10)
            client.sendall(data)
            client.settimeout(wait)
            while enough is None or enough not in received:
                more = client.recv(65536)
                if not more:
                    break
                received += more
                if enough is None and is_complete(received, data):
                    break
    except OSError:
        pass
    return received


def is_complete(received, data):
    """Whether `received` is the complete response to a single plain request."""
    if data.count(b"\r\n\r\n") != 1 or b"\r\n\r\n" not in received:
        return False
    head, body = received.split(b"\r\n\r\n", 1)
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return length is not None and len(body) >= int(length[1])


def request(method, path, body):
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return method + b" " + path + b" HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n" + body
