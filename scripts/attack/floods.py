"""Floods of frames, commands and requests that are cheap for a client and expensive for a
server."""

import itertools
import socket
import threading
import time

from http2 import GET, POST, PREFACE, frame, headers, integer, literal

CONNECTIONS = 8
SECONDS = 1.2

# Whether the server must close the flooding connections. In any case, it must serve other clients
# and limit its memory.
CLOSED, ANY = "closed", "any"
UNREAD = "without reading"


def control():
    """Floods of control frames, for which no request is needed."""

    def always(data):
        return lambda: itertools.repeat(data * 200)

    open_stream = headers(POST, end=False)
    closed_stream = headers(GET)
    yield "PING", b"", always(frame(6, 0, b"sentinel"))
    yield "PING ACK", b"", always(frame(6, 1, b"sentinel"))
    yield "SETTINGS", b"", always(frame(4, 0, b""))
    yield "SETTINGS ACK", b"", always(frame(4, 1, b""))
    yield (
        "SETTINGS of the window",
        open_stream,
        always(frame(4, 0, b"\0\4\0\0\0\0") + frame(4, 0, b"\0\4\0\0\xff\xff")),
    )
    yield (
        "SETTINGS of the header table",
        b"",
        always(frame(4, 0, b"\0\1\0\0\0\0") + frame(4, 0, b"\0\1\0\0\x10\0")),
    )
    yield "SETTINGS of unknown names", b"", always(frame(4, 0, b"\xff\xff\0\0\0\1" * 50))
    yield "PRIORITY of one stream", b"", always(frame(2, 0, b"\0\0\0\0\1", 1))
    yield (
        "PRIORITY of many streams",
        b"",
        lambda: (
            b"".join(
                frame(2, 0, b"\0\0\0\0\1", 2 * number + 1) for number in range(start, start + 200)
            )
            for start in itertools.count(0, 200)
        ),
    )
    yield "PRIORITY_UPDATE", b"", always(frame(16, 0, b"\0\0\0\1u=1"))
    yield "WINDOW_UPDATE of the connection", b"", always(frame(8, 0, b"\0\0\0\1"))
    yield "WINDOW_UPDATE of an open stream", open_stream, always(frame(8, 0, b"\0\0\0\1", 1))
    yield "WINDOW_UPDATE of a closed stream", closed_stream, always(frame(8, 0, b"\0\0\0\1", 1))
    yield "RST_STREAM of a closed stream", closed_stream, always(frame(3, 0, b"\0\0\0\x08", 1))
    yield "unknown frames", b"", always(frame(99, 0, b""))
    yield "unknown frames of 8 KiB", b"", always(frame(99, 0, b"x" * 8_192))
    yield "ALTSVC", b"", always(frame(10, 0, b"\0\1xh2=\":1\"", 0))
    yield "ORIGIN", b"", always(frame(12, 0, b"\0\x08http://x"))
    yield "empty DATA", open_stream, always(frame(0, 0, b"", 1))
    yield "DATA of padding", open_stream, always(frame(0, 8, b"\x05" + b"\0" * 5, 1))
    yield "DATA of a closed stream", closed_stream, always(frame(0, 0, b"", 1))
    yield "GOAWAY", b"", always(frame(7, 0, b"\0" * 8))
    block = b"".join(literal(name, value) for name, value in GET)
    yield "empty CONTINUATION", frame(1, 1, block, 1), always(frame(9, 0, b"", 1))
    yield (
        "CONTINUATION with fields",
        frame(1, 1, block, 1),
        always(frame(9, 0, literal(b"x", b"y" * 60), 1)),
    )
    yield (
        "CONTINUATION of one byte",
        frame(1, 1, block, 1) + frame(9, 0, b"\0" + integer(120, 7), 1),
        always(frame(9, 0, b"x", 1)),
    )
    yield (
        "empty HEADERS without an end",
        b"",
        lambda: (frame(1, 1, b"", 2 * number + 1) * 2 for number in itertools.count()),
    )


def requests():
    """Floods of frames that open streams."""

    def streams(make):
        return lambda: (
            b"".join(make(2 * number + 1) for number in range(start, start + 50))
            for start in itertools.count(0, 50)
        )

    reset = b"\0\0\0\x08"
    yield (
        "HEADERS and RST_STREAM",
        b"",
        streams(lambda stream: headers(GET, stream) + frame(3, 0, reset, stream)),
    )
    yield (
        "open HEADERS and RST_STREAM",
        b"",
        streams(lambda stream: headers(POST, stream, end=False) + frame(3, 0, reset, stream)),
    )
    yield (
        "HEADERS and a WINDOW_UPDATE of 0",
        b"",
        streams(lambda stream: headers(POST, stream, end=False) + frame(8, 0, b"\0\0\0\0", stream)),
    )
    yield (
        "HEADERS and a window too large",
        b"",
        streams(
            lambda stream: (
                headers(POST, stream, end=False) + frame(8, 0, b"\x7f\xff\xff\xff", stream)
            )
        ),
    )
    yield (
        "HEADERS that depend on themselves",
        b"",
        streams(
            lambda stream: frame(
                1,
                37,
                stream.to_bytes(4, "big") + b"\1" + b"".join(literal(*pair) for pair in GET),
                stream,
            )
        ),
    )
    yield (
        "DATA over the length",
        b"",
        streams(
            lambda stream: (
                headers(POST + [(b"content-length", b"1")], stream, end=False)
                + frame(0, 1, b"xx", stream)
            )
        ),
    )
    yield "malformed HEADERS", b"", streams(lambda stream: headers(GET + [(b"X", b"y")], stream))
    yield "HEADERS " + UNREAD, b"", streams(lambda stream: headers(GET, stream))
    yield (
        "HEADERS with windows of 0",
        frame(4, 0, b"\0\4\0\0\0\0"),
        streams(lambda stream: headers(GET, stream)),
    )
    yield (
        "more open streams than allowed",
        b"",
        streams(lambda stream: headers(POST, stream, end=False)),
    )
    yield (
        "trailers without a body",
        b"",
        streams(lambda stream: headers(POST, stream, end=False) + headers([(b"x", b"y")], stream)),
    )
    # Put one field of 3,000 bytes into HPACK's dynamic table, and send 1,000 one-byte references to
    # it in each request.
    indexed = b"\x40" + integer(1, 7) + b"x" + integer(3_000, 7) + b"y" * 3_000
    plain = b"".join(literal(*pair) for pair in GET)
    yield (
        "references to the header table",
        frame(1, 5, plain + indexed, 1),
        lambda: (frame(1, 5, plain + b"\xbe" * 1_000, stream) for stream in itertools.count(3, 2)),
    )
    yield (
        "changes of the header table",
        b"",
        streams(lambda stream: frame(1, 5, b"\x20" * 50 + plain, stream)),
    )
    yield (
        "DATA of one byte",
        headers(POST, end=False),
        lambda: itertools.repeat(frame(0, 0, b"x", 1) * 200),
    )


def kinds():
    """HTTP/2 floods: the name, the expected end, the first bytes, and the repeated pieces."""
    for name, first, pieces in control():
        yield name, CLOSED, PREFACE + first, pieces
    for name, first, pieces in requests():
        yield name, ANY, PREFACE + first, pieces


def of_resp():
    """Redis protocol floods, in the same form as `kinds`."""
    for name, first, piece in (
        ("PING " + UNREAD, b"", b"*1\r\n$4\r\nPING\r\n"),
        ("PING", b"", b"PING\r\n"),
        ("empty lines", b"", b"\r\n"),
        ("empty arrays", b"", b"*0\r\n"),
        ("unknown commands", b"", b"x\r\n"),
        ("MULTI without EXEC", b"MULTI\r\n", b"PING\r\n"),
        ("wrong arguments", b"", b"CL.THROTTLE k -1 1 1\r\n"),
        ("ECHO of 4 kB " + UNREAD, b"", b"ECHO " + b"x" * 4_000 + b"\r\n"),
    ):
        yield name, ANY, first, lambda piece=piece: itertools.repeat(piece * 200)


def of_http1():
    """HTTP/1.1 floods, in the same form as `kinds`."""
    head = b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for name, first, piece in (
        ("GET " + UNREAD, b"", b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        ("GET", b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        ("empty lines", b"", b"\r\n"),
        ("header lines", b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
        ("a header without an end", b"GET / HTTP/1.1\r\nX: ", b"y"),
        ("a target without an end", b"GET /", b"y"),
        ("chunks of one byte", head, b"1\r\nx\r\n"),
        ("chunk extensions", head + b"1;", b"x"),
        ("zeros before a chunk size", head, b"0"),
        ("trailers", head + b"0\r\n", b"X: y\r\n"),
    ):
        yield name, ANY, first, lambda piece=piece: itertools.repeat(piece * 200)


def flood(address, name, first, pieces, other):
    """Returns the number of flooding connections still open at the end, and another client's
    response times (infinity for a failed request)."""
    alive, latencies, end = [], [], time.monotonic() + SECONDS

    def send_flood():
        try:
            with socket.create_connection(
                address, timeout=5, source_address=("127.0.0.3", 0)
            ) as client:
                client.sendall(first)
                for piece in pieces():
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    client.settimeout(max(left, 0.05))
                    client.sendall(piece)
                    if UNREAD not in name and not drain(client):
                        return
                # The server may have closed the connection after the last piece.
                time.sleep(0.3)
                if drain(client):
                    alive.append(client)
        except TimeoutError:
            # The server neither reads from the connection nor closes it.
            alive.append(None)
        except OSError:
            pass

    threads = [threading.Thread(target=send_flood) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    is_over = False
    # Measure at least one response, even if the server closes all flooding connections immediately.
    while not is_over:
        is_over = not any(thread.is_alive() for thread in threads)
        began = time.monotonic()
        served = other()
        latencies.append(time.monotonic() - began if served else float("inf"))
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    return len(alive), latencies


def drain(client):
    """Reads the received bytes. Returns whether the connection is still open."""
    client.settimeout(0.001)
    try:
        return bool(client.recv(1 << 18))
    except TimeoutError:
        return True
