"""Small clients that count the admitted requests, because a limiter that admits everything is
fast."""

import http.client
import json
import socket


class Resp:
    """A connection to a server that speaks the Redis protocol."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = self.socket.makefile("rb")

    @staticmethod
    def encode(words):
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        return b"*%d\r\n" % len(parts) + b"".join(
            b"$%d\r\n%s\r\n" % (len(part), part) for part in parts
        )

    def send(self, data):
        self.socket.sendall(data)

    def reply(self):
        line = self.reader.readline()
        if not line:
            raise ConnectionError("the server closed the connection")
        kind, rest = line[:1], line[1:].strip()
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self.reader.read(int(rest) + 2)[:-2]
        if kind == b"+":
            return rest.decode()
        raise ConnectionError(f"the server replied {line!r}")

    def ask(self, commands, depth=600):
        """Sends the commands in pipelines of `depth`. Returns the replies in order."""
        replies = []
        for start in range(0, len(commands), depth):
            batch = commands[start : start + depth]
            self.send(b"".join(map(self.encode, batch)))
            replies += [self.reply() for _ in batch]
        return replies

    def close(self):
        self.reader.close()
        self.socket.close()


class Http:
    """A keep-alive connection to a listener that accepts throttle requests in JSON."""

    def __init__(self, port, path):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.path = path

    def allowed(self, body):
        """Returns whether the request is admitted, according to the response body."""
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", self.path, json.dumps(body), headers)
        response = self.connection.getresponse()
        decision = json.loads(response.read())
        if response.status not in (200, 429):
            raise SystemExit(f"POST {self.path} returned {response.status} for {body}: {decision}")
        return decision["allowed"]

    def close(self):
        self.connection.close()
