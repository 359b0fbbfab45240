"""Encodes HTTP/2 frames by hand, because HTTP/2 libraries refuse to send invalid frames."""

import socket

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"
GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/h2"), (b":authority", b"x")]


def frame(kind, flags, payload, stream=0):
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def integer(number, bits, first=0):
    most = (1 << bits) - 1
    if number < most:
        return bytes((first | number,))
    data, number = bytearray((first | most,)), number - most
    while number >= 128:
        data.append(number % 128 | 128)
        number //= 128
    data.append(number)
    return bytes(data)


def literal(name, value):
    return b"\0" + integer(len(name), 7) + name + integer(len(value), 7) + value


def headers(fields, stream=1, end=True):
    return frame(1, 5 if end else 4, b"".join(literal(name, value) for name, value in fields),
                 stream)


def ask(address, fields):
    """Sends a request. Returns the response status in the form of HTTP/1.1, or nothing if the
    stream was refused."""
    return exchange(address, headers(fields))


def exchange(address, request):
    """Sends a request's frames, and returns the same result as `ask`."""
    for kind, flags, stream, payload in frames(address, PREFACE + request):
        if kind == 1 and stream == 1:
            # Only common statuses have an index in the static table of HPACK.
            statuses = {0x88: b"200", 0x89: b"204", 0x8a: b"206", 0x8b: b"304", 0x8c: b"400",
                        0x8d: b"404", 0x8e: b"500"}
            return b"HTTP/1.1 " + statuses.get(payload[0], b"4xx")
        if kind in (3, 7):
            return b""
    return b""


def call(address, payload):
    """Sends a payload to the rate limit service. Returns the gRPC status (`0` for a decision,
    otherwise empty) and the received bytes."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"),
              (b":path", b"/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"),
              (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers")]
    request = headers(fields, end=False) + frame(0, 1, payload, 1)
    received, has_message = [], False
    for kind, _, _, content in frames(address, PREFACE + request):
        received.append(content)
        # Only a decision contains a message.
        has_message |= kind == 0 and len(content) > 5
    return b"0" if has_message else b"", b"".join(received)


def frames(address, data):
    """Sends `data`, and yields the received frames until the stream ends or no data arrives for two
    seconds."""
    try:
        with socket.create_connection(address, timeout=5) as client:
            client.sendall(data)
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


def send(address, data):
    try:
        with socket.create_connection(address, timeout=5) as client:
            client.sendall(PREFACE + data)
            client.settimeout(0.05)
            client.recv(65536)
    except OSError:
        pass


CONTROLS = [bytes((octet,)) for octet in (*range(9), *range(10, 32), 127)]
SEQUENCES = [b"\r\n", b"\n", b"\r", b"\0", b"\r\n\r\n", b"\n\n", b"\r\r\n", b"\r\n "]
INJECTED = b"x-injected: 1"
POST = [(b":method", b"POST")] + GET[1:]


def injections():
    """Names, and the frames of requests. No part of a request may become a separate line or request
    when the proxy sends it over HTTP/1.1."""
    for name, fields in (*separators(), *names(), *connection_fields(), *targets(),
                         *pseudo_headers(), *hosts()):
        yield name, headers(fields)
    yield from bodies()
    yield from trailers()
    yield from splits()


def placements(data, payload):
    """One request for each field in which `data` can separate `payload` from the rest."""
    yield "value", GET + [(b"x", b"y" + data + payload)]
    yield "name", GET + [(b"x" + data + payload, b"y")]
    yield "cookie", GET + [(b"cookie", b"a=b" + data + payload)]
    yield "host", GET + [(b"host", b"x" + data + payload)]
    for at, (name, value) in enumerate(GET):
        fields = list(GET)
        fields[at] = (name, value + data + payload)
        yield name.decode(), fields


def separators():
    for data in CONTROLS:
        for place, fields in placements(data, INJECTED):
            yield f"{place} {data!r}", fields
        yield f"end of a value {data!r}", GET + [(b"x", b"y" + data)]
        yield f"beginning of a value {data!r}", GET + [(b"x", data + b"y")]
        yield f"end of a name {data!r}", GET + [(b"x" + data, b"y")]
    for data in SEQUENCES:
        for what, payload in (("line", INJECTED), ("request",
                                                   b"x: y" + data + data + b"GET /denied/x HTTP/1.1" + data + b"host: x" + data + data),
                              ("end of a line", b" HTTP/1.1" + data + INJECTED + data)):
            for place, fields in placements(data, payload):
                yield f"{place} {data!r} {what}", fields


def names():
    for octet in (*b"\"(),/:;<=>?@[\\]{} ", *range(65, 91), *range(128, 256, 4)):
        yield f"name with {octet:#x}", GET + [(b"x-" + bytes((octet,)) + b"injected", b"1")]
    for name in (b"", b":", b":x-injected", b" x-injected", b"x-injected ", b"\tx-injected",
                 b"x-injected:", b"x-injected: 1\r\ny",
                 b":path ", b":Path"):
        yield f"name {name!r}", GET + [(name, b"1")]


def connection_fields():
    for name in (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding",
                 b"upgrade", b"te"):
        for value in (b"close", b"chunked", b"x-injected", b"gzip, trailers", b"websocket", b""):
            yield f"{name!r}: {value!r}", GET + [(name, value)]


def targets():
    for path in (b"", b"*", b"/denied/x", b"//denied/x", b"/./denied/x", b"/a/../denied/x",
                 b"/%64enied/x", b"/denied%2fx", b"/h2 HTTP/1.1",
                 b"http://x/denied/x", b"/denied\\x",
                 b"/h2#/denied", b"/denied//x", b"/denied/./x", b"/%2e/denied/x",
                 b"/a/%2e%2e/denied/x", b"/%2E%2e/denied/x",
                 b"/../denied/x", b"/a/b/../../denied/x", b"/denied/x?y",
                 b"/denied/%78", b"///denied/x", b"/.//denied/x", b"/denied/../denied/x",
                 b"/a/..//denied/x", b"/%64%65%6e%69%65%64/x",
                 b"/denied/x#y", b"denied/x", b"\\denied\\x",
                 b"/%2fdenied/x", b"/%252e%252e/denied/x", b"/denied;a/x", b"/;a/../denied/x",
                 b"/a/..;/denied/x", b"/%00/denied/x",
                 b"/denied/x%00", b"/\xc0\xafdenied/x", b"/\xe2\x81\x84denied/x",
                 b" /denied/x", b"/denied/x ", b"/denied /x", b"/?/denied/x", b"/%3f/denied/x",
                 b"//x/denied/x", b"https://y/denied/x",
                 b"/%zz/denied/x", b"/" + b"a/../" * 50 + b"denied/x"):
        yield f"path {path!r}", [(b":method", b"GET"), (b":scheme", b"http"), (b":path", path),
                                 (b":authority", b"x")]
    for method in (b"", b"CONNECT", b"GET /denied/x HTTP/1.1\r\nx: ", b"PRI", b"G ET", b"GET\t",
                   b" GET", b"GET /denied/x", b"get",
                   b"TRACE", b"G\xc3\x89T", b"G(T", b"X" * 5_000, b"GET,POST", b"GET\0"):
        yield f"method {method[:20]!r}", [(b":method", method)] + GET[1:]
    for scheme in (b"", b"https", b"ftp", b"http://x/denied/x", b"http:", b" http", b"h\xfftp",
                   b"http\r\n", b"1http", b"javascript"):
        yield f"scheme {scheme!r}", [GET[0], (b":scheme", scheme), *GET[2:]]
    for protocol in (b"websocket", b"", b"connect-udp", b"x\r\nx-injected: 1"):
        for method in (b"CONNECT", b"GET"):
            yield f"extended {method!r} {protocol!r}", [(b":method", method), *GET[1:],
                                                        (b":protocol", protocol)]


def hosts():
    for authority in (b"", b" x", b"x ", b"x y", b"x,y", b"user@x", b"x:99999", b"x:-1",
                      b"x:80:80", b"[::1", b"::1", b"x/denied", b"x?y",
                      b"x#y", b"x\\y", b"[::1]x", b"%78", b"x%0d%0ax-injected:1",
                      b"\xff", b"x:", b"x:8_0", b"x;y", b"<x>", b"x\"", b"'x'", b"a" * 300):
        yield f"authority {authority[:20]!r}", [*GET[:3], (b":authority", authority)]
    for host in (b"other", b"x", b"X", b"x:80", b"", b"x, y", b"x\ty", b"user@x"):
        yield f"authority and host {host!r}", GET + [(b"host", host)]
        yield f"host alone {host!r}", GET[:3] + [(b"host", host)]
    yield "two hosts", GET + [(b"host", b"other"), (b"host", b"x")]
    yield "two equal hosts", GET[:3] + [(b"host", b"x"), (b"host", b"x")]


def pseudo_headers():
    for at, (name, value) in enumerate(GET):
        yield f"no {name!r}", GET[:at] + GET[at + 1:]
        yield f"{name!r} twice", GET + [(name, value)]
        yield f"{name!r} twice, different", GET + [(name, b"/denied/x")]
        yield f"{name!r} after a header", GET[:at] + GET[at + 1:] + [(b"x", b"y"), (name, value)]
        yield f"{name!r} in upper case", GET[:at] + [(name.upper(), value)] + GET[at + 1:]
    for name in (b":status", b":host", b":version", b":x", b":"):
        yield f"{name!r}", GET + [(name, b"1")]
        yield f"{name!r} first", [(name, b"1")] + GET
    yield "no fields", []
    yield "101 headers", GET + [(b"x-%d" % number, b"y") for number in range(101)]
    yield "a long value", GET + [(b"x", b"y" * 14_000)]
    yield "a long name", GET + [(b"x" * 14_000, b"y")]
    yield "many cookies", GET + [(b"cookie", b"a=b")] * 300


def bodies():
    """Lengths that differ from the body's length, and bodies that look like requests."""
    hidden = b"0\r\n\r\nGET /denied/x HTTP/1.1\r\nhost: x\r\nx-injected: 1\r\n\r\n"
    for length in (b"0", b"1", b"4", b"5", b"6", b"-1", b"-5", b"+5", b"0x5", b"5.0", b"5,5",
                   b"5, 5", b"5;5", b"", b" 5", b"5 ", b"5\0",
                   b"x", b"1e1", b"99999999999999999999", b"\xef\xbc\x95", b"005"):
        for body in (b"", b"hello", hidden):
            if int_or_none(length) == len(body):
                continue
            head = headers(POST + [(b"content-length", length)], end=False)
            yield f"length {length!r} of {len(body)}", head + frame(0, 1, body, 1)
    for first, second in ((b"5", b"6"), (b"0", b"5"), (b"5", b"5"), (b"5", b"")):
        fields = POST + [(b"content-length", first), (b"content-length", second)]
        yield f"lengths {first!r} {second!r}", headers(fields, end=False) + frame(0, 1, b"hello", 1)
    for coding in (b"chunked", b"identity", b"gzip, chunked", b"Chunked", b"xchunked"):
        for length in ([], [(b"content-length", b"%d" % len(hidden))], [(b"content-length", b"0")]):
            head = headers(POST + length + [(b"transfer-encoding", coding)], end=False)
            yield f"coding {coding!r} {length}", head + frame(0, 1, hidden, 1)
    for method in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
        head = headers([(b":method", method)] + GET[1:], end=False)
        yield f"{method!r} with a body", head + frame(0, 1, hidden, 1)


def int_or_none(value):
    return int(value) if value.isdigit() and value.isascii() else None


def trailers():
    """Trailers that imitate headers, pseudo-headers or lines."""
    def with_trailers(fields):
        return headers(POST, end=False) + frame(0, 0, b"hello", 1) + headers(fields)

    for data in SEQUENCES:
        yield f"trailer value {data!r}", with_trailers([(b"x", b"y" + data + INJECTED)])
        yield f"trailer name {data!r}", with_trailers([(b"x" + data + INJECTED, b"y")])
    for name, value in ((b":path", b"/denied/x"), (b":method", b"PUT"), (b":status", b"200"),
                        (b":authority", b"y"),
                        (b"content-length", b"0"), (b"transfer-encoding", b"chunked"),
                        (b"host", b"y"),
                        (b"connection", b"x-api-key"), (b"x-injected", b"1"),
                        (b"X-Injected", b"1"), (b"", b"1"), (b"upgrade", b"h2c"),
                        (b"authorization", b"x"), (b"cookie", b"a=b")):
        yield f"trailer {name!r}", with_trailers([(name, value)])
    open_trailers = headers(POST, end=False) + headers([(b"x-injected", b"1")], end=False)
    yield "trailers without the end of the stream", open_trailers


def splits():
    """Header blocks split inside a field into several frames, and injections in padding and
    priority fields."""
    block = b"".join(literal(name, value) for name, value in GET + [(b"x", b"y\r\n" + INJECTED)])
    for at in range(8, len(block), 8):
        yield f"cut at {at}", frame(1, 1, block[:at], 1) + frame(9, 4, block[at:], 1)
    for padding in (0, 1, 5, 255):
        yield f"padding {padding}", frame(1, 13, bytes((padding,)) + block + b"\r" * padding, 1)
    yield "priority", frame(1, 37, b"\0\0\0\0\1" + block, 1)


def values():
    """Spellings of a key."""
    yield "plain", lambda key: key
    for name, data in (("space", b" "), ("tab", b"\t"), ("two spaces", b"  "),
                       ("space and tab", b" \t"), ("no-break space", b"\xc2\xa0"),
                         ("vertical tab", b"\x0b"), ("form feed", b"\x0c")):
        yield f"{name} before", lambda key, data=data: data + key
        yield f"{name} behind", lambda key, data=data: key + data
        yield f"{name} around", lambda key, data=data: data + key + data
