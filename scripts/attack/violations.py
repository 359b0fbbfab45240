"""Violations of RFC 9113 (HTTP/2) and RFC 7541 (HPACK), section by section, in the order of h2spec.

A case consists of the first bytes of a connection and the level of the expected error. A connection
error is a `GOAWAY` or a closed connection. A stream error can also be a `RST_STREAM`, or a response
with a 4xx status. A `PING` at the end shows whether the violation was ignored.
"""

import socket

from http2 import GET, POST, PREFACE, frame, headers, integer, literal

CONNECTION, STREAM = "connection", "stream"
PING = frame(6, 0, b"the last")
BLOCK = b"".join(literal(name, value) for name, value in GET)


def setting(name, value):
    return name.to_bytes(2, "big") + value.to_bytes(4, "big")


def cases():
    opened = headers(POST, end=False)
    ended = headers(GET)
    # 3.4: the preface.
    for name, data in (
        ("another method", b"PRJ * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("another version", b"PRI * HTTP/3.0\r\n\r\nSM\r\n\r\n"),
        ("bare LF", b"PRI * HTTP/2.0\n\nSM\n\n"),
        ("another end", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"),
        ("no end", b"PRI * HTTP/2.0\r\n\r\n\r\n\r\n\r\n"),
    ):
        yield f"3.4 {name}", CONNECTION, data + PREFACE[24:], False
    # The HTTP/2 library accepts a PING before the first SETTINGS. h2spec does not require an error
    # for it either.
    for name, data in (("HEADERS first", ended), ("DATA first", frame(0, 0, b"x", 1))):
        yield f"3.4 {name}", CONNECTION, PREFACE[:24] + data, False
    for section, level, data in (
        # 4: frames and header blocks.
        ("4.2 DATA over the frame size", CONNECTION, opened + frame(0, 0, b"x" * 16_385, 1)),
        ("4.2 HEADERS over the frame size", CONNECTION, frame(1, 5, BLOCK + b"\0" * 16_385, 1)),
        ("4.2 SETTINGS over the frame size", CONNECTION, frame(4, 0, setting(0xFFFF, 1) * 3_000)),
        ("4.2 unknown over the frame size", CONNECTION, frame(99, 0, b"x" * 16_385)),
        ("4.3 a block that ends in a field", CONNECTION, frame(1, 5, BLOCK + b"\0\5xx", 1)),
        ("4.3 a block that ends in an integer", CONNECTION, frame(1, 5, BLOCK + b"\x7f\xff", 1)),
        (
            "4.3 PRIORITY within a block",
            CONNECTION,
            frame(1, 1, BLOCK, 1) + frame(2, 0, b"\0\0\0\0\1", 1),
        ),
        ("4.3 PING within a block", CONNECTION, frame(1, 1, BLOCK, 1) + PING),
        ("4.3 DATA within a block", CONNECTION, frame(1, 1, BLOCK, 1) + frame(0, 1, b"", 1)),
        ("4.3 HEADERS within a block", CONNECTION, frame(1, 1, BLOCK, 1) + headers(GET, 3)),
        ("4.3 unknown within a block", CONNECTION, frame(1, 1, BLOCK, 1) + frame(99, 0, b"", 1)),
        (
            "4.3 CONTINUATION of another stream",
            CONNECTION,
            frame(1, 1, BLOCK, 1) + frame(9, 4, b"", 3),
        ),
        # 5.1: states of a stream.
        ("5.1 idle: DATA", CONNECTION, frame(0, 1, b"x", 1)),
        ("5.1 idle: RST_STREAM", CONNECTION, frame(3, 0, b"\0\0\0\x08", 1)),
        ("5.1 idle: WINDOW_UPDATE", CONNECTION, frame(8, 0, b"\0\0\0\1", 1)),
        ("5.1 idle: CONTINUATION", CONNECTION, frame(9, 4, BLOCK, 1)),
        ("5.1 half-closed: DATA", STREAM, ended + frame(0, 1, b"x", 1)),
        ("5.1 half-closed: HEADERS", STREAM, ended + headers(GET)),
        ("5.1 half-closed: CONTINUATION", CONNECTION, ended + frame(9, 4, b"", 1)),
        (
            "5.1 closed: DATA after RST_STREAM",
            STREAM,
            opened + frame(3, 0, b"\0\0\0\x08", 1) + frame(0, 1, b"x", 1),
        ),
        (
            "5.1 closed: HEADERS after RST_STREAM",
            STREAM,
            opened + frame(3, 0, b"\0\0\0\x08", 1) + headers(GET),
        ),
        (
            "5.1 closed: CONTINUATION after RST_STREAM",
            CONNECTION,
            opened + frame(3, 0, b"\0\0\0\x08", 1) + frame(9, 4, b"", 1),
        ),
        ("5.1.1 an even stream", CONNECTION, headers(GET, 2)),
        ("5.1.1 a smaller stream", CONNECTION, headers(GET, 5) + headers(GET, 3)),
        ("5.1.1 stream 0", CONNECTION, headers(GET, 0)),
        (
            "5.1.2 129 open streams",
            STREAM,
            b"".join(headers(POST, 2 * number + 1, end=False) for number in range(300)),
        ),
        ("5.3.1 HEADERS that depend on themselves", STREAM, frame(1, 37, b"\0\0\0\1\1" + BLOCK, 1)),
        # 6: frames by kind.
        ("6.1 DATA of stream 0", CONNECTION, frame(0, 1, b"x")),
        ("6.1 padding of DATA over its length", CONNECTION, opened + frame(0, 9, b"\x06abcde", 1)),
        ("6.1 padded DATA without its length", CONNECTION, opened + frame(0, 9, b"", 1)),
        ("6.2 padding of HEADERS over its length", CONNECTION, frame(1, 13, b"\xff" + BLOCK, 1)),
        ("6.2 HEADERS with half a priority", CONNECTION, frame(1, 37, b"\0\0", 1)),
        ("6.3 PRIORITY of stream 0", CONNECTION, frame(2, 0, b"\0\0\0\0\1")),
        ("6.3 PRIORITY of 4 bytes", STREAM, opened + frame(2, 0, b"\0\0\0\0", 1)),
        ("6.4 RST_STREAM of stream 0", CONNECTION, frame(3, 0, b"\0\0\0\x08")),
        ("6.4 RST_STREAM of 3 bytes", CONNECTION, opened + frame(3, 0, b"\0\0\0", 1)),
        ("6.4 RST_STREAM of 5 bytes", CONNECTION, opened + frame(3, 0, b"\0\0\0\0\0", 1)),
        ("6.5 SETTINGS of a stream", CONNECTION, frame(4, 0, b"", 1)),
        ("6.5 SETTINGS ACK with a payload", CONNECTION, frame(4, 1, b"x")),
        ("6.5 SETTINGS of 3 bytes", CONNECTION, frame(4, 0, b"\0\0\0")),
        ("6.5.2 ENABLE_PUSH of 2", CONNECTION, frame(4, 0, setting(2, 2))),
        ("6.5.2 INITIAL_WINDOW_SIZE of 2^31", CONNECTION, frame(4, 0, setting(4, 2**31))),
        ("6.5.2 MAX_FRAME_SIZE of 16383", CONNECTION, frame(4, 0, setting(5, 16_383))),
        ("6.5.2 MAX_FRAME_SIZE of 2^24", CONNECTION, frame(4, 0, setting(5, 2**24))),
        ("6.6 PUSH_PROMISE of a client", CONNECTION, opened + frame(5, 4, b"\0\0\0\2" + BLOCK, 1)),
        ("6.7 PING of a stream", CONNECTION, frame(6, 0, b"sentinel", 1)),
        ("6.7 PING of 7 bytes", CONNECTION, frame(6, 0, b"sentine")),
        ("6.7 PING of 9 bytes", CONNECTION, frame(6, 0, b"sentinels")),
        ("6.8 GOAWAY of a stream", CONNECTION, frame(7, 0, b"\0" * 8, 1)),
        ("6.8 GOAWAY of 7 bytes", CONNECTION, frame(7, 0, b"\0" * 7)),
        ("6.9 WINDOW_UPDATE of 0 of the connection", CONNECTION, frame(8, 0, b"\0\0\0\0")),
        ("6.9 WINDOW_UPDATE of 0 of a stream", STREAM, opened + frame(8, 0, b"\0\0\0\0", 1)),
        ("6.9 WINDOW_UPDATE of 3 bytes", CONNECTION, frame(8, 0, b"\0\0\1")),
        (
            "6.9.1 a window of the connection over 2^31",
            CONNECTION,
            frame(8, 0, b"\x7f\xff\xff\xff") * 2,
        ),
        (
            "6.9.1 a window of a stream over 2^31",
            STREAM,
            opened + frame(8, 0, b"\x7f\xff\xff\xff", 1) * 2,
        ),
        (
            "6.9.2 SETTINGS that move a window over 2^31",
            CONNECTION,
            opened + frame(8, 0, b"\x7f\xff\0\0", 1) + frame(4, 0, setting(4, 2**31 - 1)),
        ),
        ("6.10 CONTINUATION of stream 0", CONNECTION, frame(1, 1, BLOCK, 1) + frame(9, 4, b"")),
        ("6.10 CONTINUATION after the end of a block", CONNECTION, opened + frame(9, 4, b"", 1)),
        (
            "6.10 CONTINUATION after DATA",
            CONNECTION,
            opened + frame(0, 0, b"x", 1) + frame(9, 4, b"", 1),
        ),
        # 8: requests.
        (
            "8.1 trailers without the end of the stream",
            STREAM,
            opened + headers([(b"x", b"y")], end=False),
        ),
        (
            "8.1.1 DATA over the length",
            STREAM,
            headers(POST + [(b"content-length", b"1")], end=False) + frame(0, 1, b"xx", 1),
        ),
        (
            "8.1.1 DATA below the length",
            STREAM,
            headers(POST + [(b"content-length", b"3")], end=False) + frame(0, 1, b"xx", 1),
        ),
        (
            "8.1.1 several DATA over the length",
            STREAM,
            headers(POST + [(b"content-length", b"1")], end=False)
            + frame(0, 0, b"x", 1)
            + frame(0, 1, b"x", 1),
        ),
        ("8.2 a name in upper case", STREAM, headers(GET + [(b"X-A", b"y")])),
        ("8.2.2 connection", STREAM, headers(GET + [(b"connection", b"keep-alive")])),
        ("8.2.2 te", STREAM, headers(GET + [(b"te", b"trailers, deflate")])),
        ("8.2.2 transfer-encoding", STREAM, headers(GET + [(b"transfer-encoding", b"chunked")])),
        ("8.3 an unknown pseudo-header", STREAM, headers(GET + [(b":x", b"y")])),
        ("8.3 a pseudo-header of responses", STREAM, headers(GET + [(b":status", b"200")])),
        ("8.3 a pseudo-header after a header", STREAM, headers(GET[:3] + [(b"x", b"y"), GET[3]])),
        ("8.3.1 an empty path", STREAM, headers(GET[:2] + [(b":path", b"")] + GET[3:])),
        ("8.3.1 no method", STREAM, headers(GET[1:])),
        ("8.3.1 no scheme", STREAM, headers(GET[:1] + GET[2:])),
        ("8.3.1 no path", STREAM, headers(GET[:2] + GET[3:])),
        ("8.3.1 two methods", STREAM, headers(GET + GET[:1])),
        ("8.3.1 two schemes", STREAM, headers(GET + GET[1:2])),
        ("8.3.1 two paths", STREAM, headers(GET + GET[2:3])),
        # HPACK.
        ("HPACK 2.3.3 index 70", CONNECTION, frame(1, 5, BLOCK + b"\xc6", 1)),
        ("HPACK 2.3.3 name of index 70", CONNECTION, frame(1, 5, BLOCK + b"\x7f\x07\0", 1)),
        ("HPACK 4.2 a change of the table at the end", CONNECTION, frame(1, 5, BLOCK + b"\x20", 1)),
        (
            "HPACK 5.1 an integer without an end",
            CONNECTION,
            frame(1, 5, BLOCK + b"\xff" + b"\xff" * 12, 1),
        ),
        (
            "HPACK 5.2 padding of Huffman over 7 bits",
            CONNECTION,
            frame(1, 5, BLOCK + b"\0\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff", 1),
        ),
        (
            "HPACK 5.2 padding of Huffman with zeros",
            CONNECTION,
            frame(1, 5, BLOCK + b"\0\x85\xf2\xb2\x4a\x87\xff\x83\x49\x50\x90", 1),
        ),
        (
            "HPACK 5.2 the end of Huffman within a text",
            CONNECTION,
            frame(1, 5, BLOCK + b"\0\x85\xf2\xb2\x4a\x84\xff\x87\x49\x51\xff\xff\xff\xfa\x7f", 1),
        ),
        ("HPACK 6.1 index 0", CONNECTION, frame(1, 5, BLOCK + b"\x80", 1)),
        (
            "HPACK 6.3 a table over the limit",
            CONNECTION,
            frame(1, 5, b"\x3f" + integer(2**20, 7) + BLOCK, 1),
        ),
    ):
        yield section, level, PREFACE + data, True


def outcome(address, data, with_ping):
    """Returns the level of the error (`connection` or `stream`), `response` for a response with a
    2xx status, or `ignored` if the server answered only the ping."""
    result = "ignored"
    try:
        with socket.create_connection(
            address, timeout=10, source_address=("127.0.0.4", 0)
        ) as client:
            client.settimeout(10)
            client.sendall(data + (PING if with_ping else b""))
            read = b""
            while True:
                while len(read) < 9 or len(read) < 9 + int.from_bytes(read[:3], "big"):
                    more = client.recv(65536)
                    if not more:
                        return "connection"
                    read += more
                length, kind, flags = int.from_bytes(read[:3], "big"), read[3], read[4]
                payload, read = read[9 : 9 + length], read[9 + length :]
                if kind == 7 and payload[4:8] != b"\0\0\0\0":
                    return "connection"
                if kind == 3 and payload != b"\0\0\0\0":
                    result = "stream"
                elif kind == 1:
                    result = "response" if payload[0] in (0x88, 0x89, 0x8A) else "stream"
                elif kind == 6 and flags & 1:
                    # A stream error may also be reported by the request handler.
                    if result != "ignored":
                        return result
                    client.settimeout(2)
    except TimeoutError:
        return result
    except OSError:
        return "connection"
