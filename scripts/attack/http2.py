"""HTTP/2 by hand, so that what no library sends can be sent."""

import socket
import threading
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"
GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/h2"), (b":authority", b"x")]
CONNECTIONS = 16
FLOOD_SECONDS = 3.0


def frame(kind, flags, payload, stream=0):
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def integer(number, bits, first=0):
    most = (1 << bits) - 1
    if number < most:
        return bytes((first | number,))
    octets, number = bytearray((first | most,)), number - most
    while number >= 128:
        octets.append(number % 128 | 128)
        number //= 128
    octets.append(number)
    return bytes(octets)


def literal(name, value):
    return b"\0" + integer(len(name), 7) + name + integer(len(value), 7) + value


def headers(fields, stream=1, end=True):
    return frame(1, 5 if end else 4, b"".join(literal(name, value) for name, value in fields), stream)


def ask(address, fields, body=b""):
    """The status that answers a request, as the beginning of an answer over HTTP/1.1; nothing if the stream was refused."""
    octets = PREFACE + headers(fields, end=not body) + (frame(0, 1, body, 1) if body else b"")
    for kind, flags, stream, payload in frames(address, octets):
        if kind == 1 and stream == 1:
            # The only field whose index says everything: `:status: 200` and its neighbours in the static table.
            statuses = {0x88: b"200", 0x89: b"204", 0x8a: b"206", 0x8b: b"304", 0x8c: b"400", 0x8d: b"404", 0x8e: b"500"}
            return b"HTTP/1.1 " + statuses.get(payload[0], b"4xx")
        if kind in (3, 7):
            return b""
    return b""


def call(address, payload):
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"),
              (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers")]
    octets = PREFACE + headers(fields, end=False) + frame(0, 1, payload, 1)
    return b"".join(payload for _, _, _, payload in frames(address, octets))


def frames(address, octets):
    """The frames that answer `octets`, until the stream ends or nothing comes for two seconds."""
    try:
        with socket.create_connection(address, timeout=5) as client:
            client.sendall(octets)
            client.settimeout(2)
            read = b""
            while True:
                while len(read) < 9 or len(read) < 9 + int.from_bytes(read[:3], "big"):
                    more = client.recv(65536)
                    if not more:
                        return
                    read += more
                length = int.from_bytes(read[:3], "big")
                kind, flags, stream = read[3], read[4], int.from_bytes(read[5:9], "big")
                yield kind, flags, stream, read[9:9 + length]
                read = read[9 + length:]
                if kind in (3, 7) or kind in (0, 1) and flags & 1:
                    return
    except OSError:
        return


def send(address, octets):
    try:
        with socket.create_connection(address, timeout=5) as client:
            client.sendall(PREFACE + octets)
            client.settimeout(0.05)
            client.recv(65536)
    except OSError:
        pass


def injections():
    """Names and header fields that must not become lines of HTTP/1.1."""
    bad = [b"\r\n", b"\n", b"\r", b"\0", b"\r\n\r\n", b"\n\n", b"\x0b", b"\x7f"]
    injected = b"x-injected: 1"
    for octets in bad:
        yield f"value {octets!r}", GET + [(b"x", b"y" + octets + injected)]
        yield f"name {octets!r}", GET + [(b"x" + octets + injected, b"y")]
        yield f"cookie {octets!r}", GET + [(b"cookie", b"a=b" + octets + injected)]
        for at, (name, value) in enumerate(GET):
            fields = list(GET)
            fields[at] = (name, value + octets + injected)
            yield f"{name!r} {octets!r}", fields
            fields[at] = (name, value + b" HTTP/1.1" + octets + injected + octets + octets + b"GET /denied/x HTTP/1.1")
            yield f"{name!r} {octets!r} request", fields
    for name in (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b"te", b"X-Injected", b"", b" x", b"x ", b"x:y", b"\xff", b":x-injected"):
        yield f"field {name!r}", GET + [(name, b"chunked")]
    for length in (b"0", b"5", b"-1", b"+0", b"0, 0", b"", b"x", b"99999999999999999999"):
        yield f"length {length!r}", [(b":method", b"POST")] + GET[1:] + [(b"content-length", length)]
    for path in (b"", b"*", b"/denied/x", b"//denied/x", b"/./denied/x", b"/a/../denied/x", b"/%64enied/x", b"/denied%2fx", b"/h2 HTTP/1.1\r\nx-injected: 1", b"http://x/denied/x", b"/denied\\x", b"/h2#/denied"):
        yield f"path {path!r}", [(b":method", b"GET"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    for method in (b"", b"CONNECT", b"GET /denied/x HTTP/1.1\r\nx: ", b"PRI", b"G ET"):
        yield f"method {method!r}", [(b":method", method)] + GET[1:]
    yield "no path", [GET[0], GET[1], GET[3]]
    yield "path twice", GET + [(b":path", b"/denied/x")]
    yield "pseudo after regular", GET[:3] + [(b"x", b"y"), GET[3]]
    yield "two hosts", GET + [(b"host", b"other"), (b"host", b"x")]
    yield "host that differs", GET + [(b"host", b"other")]


def values():
    """Ways of writing a key."""
    yield "plain", lambda key: key
    yield "space before", lambda key: b" " + key
    yield "space behind", lambda key: key + b" "
    yield "tab behind", lambda key: key + b"\t"
    yield "spaces around", lambda key: b"  " + key + b"  "


def messages():
    """What is no message of gRPC."""
    for body in (b"", b"\0", b"\0\0\0\0", b"\0\xff\xff\xff\xff", b"\1\0\0\0\0", b"\2\0\0\0\0", b"\0\0\0\0\5abcde", b"\0\0\0\0\2\x0a\xff", b"\0\0\0\0\1\x0a", b"x" * 10_000,
                 b"\0\0\0\0\x0b\x0a\x09" + b"\xff" * 9, b"\0\0\0\0\x02\x12\x00" * 3, b"\0\0\0\x40\0" + b"\x12\x00" * 8192):
        yield body


def floods():
    yield "PING", frame(6, 0, b"sentinel")
    yield "PING ACK", frame(6, 1, b"sentinel")
    yield "SETTINGS", frame(4, 0, b"")
    yield "SETTINGS with a window", frame(4, 0, b"\0\4\0\0\xff\xff")
    yield "PRIORITY", frame(2, 0, b"\0\0\0\0\1", 1)
    yield "WINDOW_UPDATE", frame(8, 0, b"\0\0\0\1")
    yield "unknown", frame(99, 0, b"")


def flood(address, octets, other):
    """How many of the flooding connections are open at the end, and how long others waited meanwhile."""
    clients, alive, latencies = [], [], []
    for _ in range(CONNECTIONS):
        client = socket.create_connection(address, timeout=5)
        client.sendall(PREFACE)
        clients.append(client)
    end = time.monotonic() + FLOOD_SECONDS

    def pour(client):
        pieces = octets * 500
        try:
            while time.monotonic() < end:
                client.settimeout(max(0.05, end - time.monotonic()))
                client.sendall(pieces)
                client.settimeout(0.001)
                try:
                    if not client.recv(1 << 20):
                        return
                except TimeoutError:
                    pass
            alive.append(client)
        except OSError:
            pass

    threads = [threading.Thread(target=pour, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    while time.monotonic() < end and any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        other()
        latencies.append(time.monotonic() - began)
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    return len(alive), latencies
