"""The clients of the upgrade test. Each runs in its own process, counts what was admitted, and
records every failure."""

import collections
import multiprocessing
import socket
import ssl
import sys
import time

QUOTA = "quota"  # the rule that must be exhausted exactly
TIMEOUT = 20  # seconds for one response
MAX_FAILURES = 20  # failures that a client describes


class Address(collections.namedtuple("Address", ["port", "certificate"])):
    """The address of a listener on this machine, and the file of its certificate if it uses TLS."""

    def connect(self):
        opened = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self.certificate:
            return opened
        context = ssl.create_default_context(cafile=self.certificate)
        return context.wrap_socket(opened, server_hostname="127.0.0.1")


class Result:
    def __init__(self):
        self.sent = 0
        self.answered = 0
        self.admitted = collections.Counter()
        self.refused = 0
        self.failed = 0
        self.reconnects = 0
        self.slowest = 0.0
        self.problems = []

    def note(self, name, is_admitted):
        self.answered += 1
        if is_admitted:
            self.admitted[name] += 1

    def fail(self, problem, count=1):
        self.failed += count
        if len(self.problems) < MAX_FAILURES:
            self.problems.append(f"{time.time():.3f} {problem!r}")


class Process:
    """Runs a client at `rate` requests a second until it is stopped."""

    def __init__(self, client, address, names, rate):
        self.stopping = multiprocessing.Event()
        self.receiver, sender = multiprocessing.Pipe(False)
        arguments = (client, address, names, rate, self.stopping, sender)
        self.process = multiprocessing.Process(target=run, args=arguments, daemon=True)
        self.process.start()

    def stop(self):
        self.stopping.set()
        result = self.receiver.recv()
        self.process.join()
        return result


def run(client, address, names, rate, stopping, sender):
    result = Result()
    client = client(address, result)
    due, at = time.monotonic(), 0
    while not stopping.is_set():
        batch = [names[(at + more) % len(names)] for more in range(client.batch)]
        at += client.batch
        began = time.monotonic()
        try:
            client.check(batch)
        except OSError as error:
            result.fail(f"{type(client).__name__}: {error!r}", len(batch))
            client.reset()
        result.slowest = max(result.slowest, time.monotonic() - began)
        due = max(due + client.batch / rate, began - 1)
        time.sleep(max(0.0, due - time.monotonic()))
    client.reset()
    sender.send(result)


def connect(address, result):
    try:
        return address.connect()
    except ConnectionRefusedError:
        result.refused += 1
        raise


def entries(name):
    return {"user": "u", "variant": name}


class Http:
    """Sends requests one after another on a connection that it keeps open."""

    batch = 1
    keeps = True

    def __init__(self, address, result):
        self.address, self.result, self.socket = address, result, None

    def reset(self):
        if self.socket:
            self.socket.close()
            self.socket = None

    def check(self, names):
        for name in names:
            self.ask(name)

    def ask(self, name):
        fields = ",".join(f'"{key}":"{value}"' for key, value in entries(name).items())
        body = f'{{"entries":{{{fields}}}}}'
        connection = "" if self.keeps else "Connection: close\r\n"
        request = (
            "POST /v1/check HTTP/1.1\r\nHost: tidegate\r\n"
            f"{connection}Content-Length: {len(body)}\r\n\r\n{body}"
        )
        if not self.socket:
            self.socket = connect(self.address, self.result)
            self.file = self.socket.makefile("rb")
        self.result.sent += 1
        self.socket.sendall(request.encode())
        status, closes = self.response()
        if status not in (200, 429):
            self.result.fail(f"status {status}")
        else:
            self.result.note(name, status == 200)
        if closes:
            if self.keeps:
                self.result.reconnects += 1
            self.reset()

    def response(self):
        status, length, closes = self.file.readline(), 0, False
        if not status:
            raise ConnectionError("the server closed the connection without a response")
        while (line := self.file.readline()) not in (b"\r\n", b""):
            key, _, value = line.partition(b":")
            key = key.lower()
            if key == b"content-length":
                length = int(value)
            elif key == b"connection":
                closes = b"close" in value.lower()
        if len(self.file.read(length)) < length:
            raise ConnectionError("the response is incomplete")
        return int(status.split()[1]), closes


class NewConnections(Http):
    """Opens a connection for each request."""

    keeps = False


class Pipeline:
    """Sends pipelines of the Redis protocol on a connection that it keeps open."""

    batch = 16
    lines = 8  # of a reply with a rule

    def __init__(self, address, result):
        self.address, self.result, self.socket = address, result, None

    def reset(self):
        if self.socket:
            self.socket.close()
            self.socket = None

    def check(self, names):
        if not self.socket:
            self.socket = connect(self.address, self.result)
            self.file = self.socket.makefile("rb")
        commands = []
        for name in names:
            words = " ".join(word for entry in entries(name).items() for word in entry)
            commands.append(f"TIDEGATE.CHECK {words}\r\n")
        self.result.sent += len(names)
        self.socket.sendall("".join(commands).encode())
        for name in names:
            reply = [self.file.readline() for _ in range(self.lines)]
            if not reply[-1]:
                raise ConnectionError("the server closed the connection without a reply")
            if reply[0] != b"*6\r\n":
                raise ConnectionError(f"unexpected reply {reply}")
            self.result.note(name, reply[1] == b":1\r\n")


def fill(address, keys, batch=1_000):
    """Adds `keys` keys to the memory store, which stay for more than an hour."""
    opened = address.connect()
    for first in range(0, keys, batch):
        numbers = range(first, min(first + batch, keys))
        commands = "".join(f"CL.THROTTLE filler:{number} 9 10 86400\r\n" for number in numbers)
        opened.sendall(commands.encode())
        lines = 6 * len(numbers)  # of all replies
        while lines:
            received = opened.recv(1 << 16)
            if not received:
                sys.exit("the server closed the connection while the store was filled")
            lines -= received.count(b"\n")
    opened.close()
