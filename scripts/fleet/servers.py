"""Tidegate servers in a fleet, and a client for their Redis protocol listeners."""

import json
import os
import socket
import subprocess
import sys

from programs import accepts_connections, eventually, fetch, reserve_port


class Server:
    """A server on reserved ports. `settings` is the rules file without `listen`."""

    def __init__(self, binary, folder, number, settings, environment=None):
        self.http, self.resp, self.admin = reserve_port(), reserve_port(), reserve_port()
        listeners = {"http": self.http, "resp": self.resp, "admin": self.admin}
        listen = {
            "grpc": "off",
            **{listener: f"127.0.0.1:{port}" for listener, port in listeners.items()},
        }
        self.file = os.path.join(folder, f"rules{number}.yaml")
        with open(self.file, "w") as file:
            json.dump({"listen": listen, **settings}, file)  # JSON is also valid YAML
        self.log = open(os.path.join(folder, f"log{number}"), "w")
        self.binary = binary
        self.environment = {**os.environ, **(environment or {})}

    def __enter__(self):
        if not os.path.exists(self.binary):
            sys.exit(
                f"{self.binary} does not exist; run cargo build --release --locked -p "
                "tidegate-cli, or pass --binary"
            )
        command = [self.binary, "serve", "--config", self.file]
        self.process = subprocess.Popen(command, stderr=self.log, env=self.environment)
        eventually(
            "the server is listening",
            lambda: accepts_connections(self.resp) or self.check_running(),
        )
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.log.close()

    def check_running(self):
        """Exits if the server has exited."""
        if self.process.poll() is not None:
            with open(self.log.name) as log:
                sys.exit(f"the server exited: {log.read()}")
        return False

    def is_exact(self):
        """Returns whether this server's requests are decided in Redis."""
        return json.loads(fetch(self.admin, "/readyz").read())["redis"]["state"] == "ok"

    def sources(self):
        """Returns the number of decisions by source."""
        found = {}
        for line in fetch(self.admin, "/metrics").read().decode().splitlines():
            if line.startswith("tidegate_decisions_by_source_total{"):
                name, count = line.split('"')[1], int(line.rsplit(" ", 1)[1])
                if count:
                    found[name] = count
        return found


class Client:
    """A Redis protocol client that counts the admitted checks."""

    # The number of lines in a reply with a rule: the array's length, five numbers, the name's
    # length, and the rule's name.
    LINES = 8
    NO_RULE = b"$-1\r\n"  # replaces the last two lines if no rule applied

    def __init__(self, server):
        self.socket = socket.create_connection(("127.0.0.1", server.resp))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def admitted(self, entries, times=1):
        """Sends `times` checks in one batch, and returns how many were admitted. `entries` contains
        names and values, separated by spaces."""
        self.socket.sendall(f"TIDEGATE.CHECK {entries}\r\n".encode() * times)
        replies = bytearray()
        while replies.count(b"\n") < times * self.LINES - replies.count(self.NO_RULE):
            received = self.socket.recv(65536)
            if not received:
                raise ConnectionError("the server closed the connection")
            replies += received
        assert replies.count(b"*6\r\n") == times, bytes(replies[:200])
        return replies.count(b"*6\r\n:1\r\n")


def total(counts):
    """Adds several results of `sources()`, source by source."""
    sums = {}
    for sources in counts:
        for source, count in sources.items():
            sums[source] = sums.get(source, 0) + count
    return sums


def in_words(sources):
    return ", ".join(f"{count} by {source}" for source, count in sorted(sources.items()))
