"""Tidegate servers, as many as a fleet has."""

import json
import os
import socket
import subprocess
import sys

from programs import answers, eventually, fetch, free_port


class Server:
    """A server on free ports, with these settings beside `listen`."""

    def __init__(self, binary, folder, number, settings, environment=None):
        self.http, self.resp, self.admin = free_port(), free_port(), free_port()
        listeners = {"http": self.http, "resp": self.resp, "admin": self.admin}
        listen = {"grpc": "off", **{listener: f"127.0.0.1:{port}" for listener, port in listeners.items()}}
        self.file = os.path.join(folder, f"rules{number}.yaml")
        with open(self.file, "w") as file:
            json.dump({"listen": listen, **settings}, file)  # which is YAML too
        self.log = open(os.path.join(folder, f"log{number}"), "w")
        self.binary = binary
        self.environment = {**os.environ, **(environment or {})}

    def __enter__(self):
        if not os.path.exists(self.binary):
            sys.exit(f"{self.binary} does not exist; run cargo build --release --locked -p tidegate-cli, or pass --binary")
        command = [self.binary, "serve", "--config", self.file]
        self.process = subprocess.Popen(command, stderr=self.log, env=self.environment)
        eventually("the server is listening", lambda: answers(self.resp) or self.has_ended())
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.log.close()

    def has_ended(self):
        if self.process.poll() is not None:
            with open(self.log.name) as log:
                sys.exit(f"the server exited: {log.read()}")
        return False

    def is_exact(self):
        return json.loads(fetch(self.admin, "/readyz").read())["redis"]["state"] == "ok"

    def sources(self):
        """How many decisions each source has made."""
        found = {}
        for line in fetch(self.admin, "/metrics").read().decode().splitlines():
            if line.startswith("tidegate_decisions_by_source_total{"):
                name, count = line.split('"')[1], int(line.rsplit(" ", 1)[1])
                if count:
                    found[name] = count
        return found


class Client:
    """The Redis protocol, as much of it as counting what passes needs."""

    LINES = 8  # of an answer under a rule: what follows, five numbers, the rule's name and its length
    NAMELESS = b"$-1\r\n"  # a line less, where no limit answers

    def __init__(self, server):
        self.socket = socket.create_connection(("127.0.0.1", server.resp))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def admitted(self, entries, times=1):
        """How many of so many checks pass, which are sent together; `entries` are names and values, without spaces."""
        self.socket.sendall(f"TIDEGATE.CHECK {entries}\r\n".encode() * times)
        answer = bytearray()
        while answer.count(b"\n") < times * self.LINES - answer.count(self.NAMELESS):
            octets = self.socket.recv(65536)
            if not octets:
                raise ConnectionError("the server closed the connection")
            answer += octets
        assert answer.count(b"*6\r\n") == times, bytes(answer[:200])
        return answer.count(b"*6\r\n:1\r\n")


def total(counts):
    """The sum of some `sources()`, source by source."""
    together = {}
    for sources in counts:
        for source, count in sources.items():
            together[source] = together.get(source, 0) + count
    return together


def in_words(sources):
    return ", ".join(f"{count} by {source}" for source, count in sorted(sources.items()))
