"""Ambiguous HTTP/1.1 requests and responses, and different spellings of keys, paths and cookies."""

import re
from urllib.parse import unquote_to_bytes

DENIED = b"GET /denied/x HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n"
HIDDEN = b"GET /denied/@ HTTP/1.1\r\nHost: x\r\nX-Hidden: "
HEALTHY = b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def token(secret):
    return b"GET /v1/rules HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + secret + b"\r\n\r\n"


def check(secret):
    body = b'{"key": "k", "algorithm": "gcra", "rate": "1/s", "burst": 100}'
    head = b"POST /v1/throttle HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secret + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


def smuggling():
    """Names and request heads. The caller replaces `@` with a number."""
    codings = [b"chunked", b"Chunked", b" chunked", b"\tchunked", b"chunked ", b"xchunked",
               b"chunked, identity", b"identity, chunked",
               b"chunked, chunked",
               b"\"chunked\"", b"chunked;q=1", b"identity", b"gzip, chunked", b"\x0bchunked",
               b"chunke\xc4\x8f", b"chunked\x00",
               b"\r\n chunked", b",chunked", b""]
    names = [b"Transfer-Encoding: ", b"Transfer-Encoding:", b"Transfer-Encoding : ",
             b"transfer-encoding: ", b"Transfer_Encoding: ",
             b" Transfer-Encoding: ",
             b"X: y\nTransfer-Encoding: ", b"X: y\rTransfer-Encoding: ",
             b"Transfer-Encoding\x00: ", b"Transfer-Encoding\t: "]
    lengths = [b"", b"Content-Length: 4\r\n", b"Content-Length: 6\r\n"]
    bodies = [b"0\r\n\r\n" + HIDDEN, b"1\r\nZ\r\n0\r\n\r\n" + HIDDEN]
    for name in names:
        for coding in codings:
            for length in lengths:
                head = b"POST /s HTTP/1.1\r\nHost: x\r\n" + length + name + coding + b"\r\n\r\n"
                yield f"{name!r}{coding!r} {length!r}", head + bodies[len(coding) % 2]
    values = [b"+0", b"-0", b"0x0", b"0 ", b" 0", b"0,0", b"0, 0", b"0;", b"1e0",
              b"00000000000000000000", b"18446744073709551616",
              b"\xef\xbc\x90", b"", b"0\x0b"]
    for value in values:
        for name in (b"Content-Length: ", b"Content-Length : ", b"Content-Length\x00: ",
                     b" Content-Length: "):
            yield f"{name!r}{value!r}", b"POST /s HTTP/1.1\r\nHost: x\r\n" + name + value + b"\r\n\r\n" + HIDDEN
    for first, second in ((b"0", b"40"), (b"40", b"0"), (b"0", b"0")):
        head = b"POST /s HTTP/1.1\r\nHost: x\r\nContent-Length: " + first + b"\r\nContent-Length: " + second + b"\r\n\r\n"
        yield f"two lengths {first!r} {second!r}", head + HIDDEN
    sizes = [b"0x1", b"+1", b"-1", b"1 ", b" 1", b"1;x\n", b"1\r", b"1\n", b"FFFFFFFFFFFFFFFFF",
             b"g", b"", b"1;" + b"x" * 70000,
             b"1;\"\r\n\"", b"\xef\xbc\x91"]
    for size in sizes:
        for end in (b"\r\n", b"\n", b"\r\r\n", b"\r"):
            body = size + end + b"Z" + end + b"0" + end + end + HIDDEN
            yield f"chunk size {size[:20]!r}{end!r}", b"POST /s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    chunked = b"POST /s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    for trailer in (b"X: y\n\n", b"X: y\r\r\n\r\n", b"Content-Length: 40\r\n\r\n", b"X\r\n\r\n",
                    b" X: y\r\n\r\n", b"X: y\x00\r\n\r\n"):
        yield f"trailer {trailer!r}", chunked + trailer + HIDDEN
    for line in (b"GET /s HTTP/1.1\x0b", b"GET  /s HTTP/1.1", b"GET /s  HTTP/1.1",
                 b"GET\t/s\tHTTP/1.1", b"GET /s HTTP/1.1 x",
                 b"GET /s HTTP/1.2", b"GET /s HTTP/2.0",
                 b"GET /s", b"GET /s HTTP/0.9", b"GET /s HTTP/1.1\r\n\x20x",
                 b"CONNECT /denied/x HTTP/1.1",
                 b"GET /s\nGET /denied/@ HTTP/1.1"):
        yield f"{line!r}", line + b"\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    for lines in (b"Expect: 100-continue\r\nContent-Length: 5\r\n",
                  b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n",
                  b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
                  b"Connection: Content-Length\r\nContent-Length: 0\r\n",
                  b"Connection: Host\r\n"):
        yield f"{lines!r}", b"POST /s HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n" + HIDDEN


def mutate(data, chance):
    data = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(data))
        action = chance.randrange(5)
        if action == 0:
            data[at] = chance.randrange(256)
        elif action == 1:
            del data[at]
        elif action == 2:
            data.insert(at, chance.choice(b"\r\n\t \x00\x0b:/;,%.\\?#\xff"))
        elif action == 3:
            data[at:at] = data[at:at + chance.randrange(1, 12)]
        else:
            data[at] ^= 1 << chance.randrange(8)
        if not data:
            return b"\r\n"
    return bytes(data)


def is_denied(line):
    """Whether a request line contains the denied path. The path is interpreted as in common
    servers: decoded once, slashes merged, dots resolved."""
    parts = line.split(b" ")
    if len(parts) != 3:
        return False
    # An encoded slash is not a separator (RFC 3986). The rules and the upstream both see the
    # encoded form.
    path = re.sub(rb"(?i)%2f", b"%252f", re.split(rb"[?#]", parts[1])[0])
    path = unquote_to_bytes(path)
    path = re.sub(rb"^[a-z]+://[^/]*", b"", path)
    resolved = []
    for segment in re.sub(rb"/+", b"/", path).split(b"/"):
        if segment == b"..":
            resolved = resolved[:-1]
        elif segment != b".":
            resolved.append(segment)
    return b"/".join(resolved).startswith(b"/denied/")


def evasions():
    """Spellings of a key. Each is a function that returns a request for the key."""
    head = b"GET /k HTTP/1.1\r\nHost: x\r\n"
    for name, lines in (
        ("plain", b"X-Api-Key: @"), ("spaces", b"X-Api-Key:   @  "), ("tab", b"X-Api-Key:\t@\t"),
        ("upper case", b"X-API-KEY: @"),
        ("underscore", b"X_Api_Key: @"),
        ("underscores beside", b"X-Api-Key: other\r\nX_Api_Key: @"),
        ("hidden by Connection", b"Connection: close, x-api-key\r\nX-Api-Key: @"),
        ("named by Connection alone", b"Connection: x-api-key\r\nX-Api-Key: @"),
        ("twice", b"X-Api-Key: @\r\nX-Api-Key: @"),
        ("after another", b"X-Api-Key: a\r\nX-Api-Key: @"),
        ("before another", b"X-Api-Key: @\r\nX-Api-Key: a"), ("vertical tab", b"X-Api-Key: @\x0b"),
        ("form feed", b"X-Api-Key: \x0c@"),
        ("folded", b"X-Api-Key:\r\n @"),
        ("no-break space", b"X-Api-Key: \xc2\xa0@"), ("quoted name", b"\"X-Api-Key\": @"),
        ("name with a space", b"X-Api-Key : @"),
    ):
        end = b"\r\nConnection: close\r\n\r\n"
        yield name, lambda key, lines=lines: head + lines.replace(b"@", key) + end
    lines = b"Transfer-Encoding: chunked\r\nTrailer: X-Api-Key\r\n\r\n0\r\nX-Api-Key: "
    yield "trailer", lambda key: head.replace(b"GET", b"POST") + lines + key + b"\r\n\r\n"


def responses():
    """Names, and responses from a hostile upstream. A response that contains `INJECTED` hides a
    second response."""
    second = b"HTTP/1.1 200 INJECTED\r\nContent-Length: 8\r\n\r\nINJECTED"
    for value in (b"0, 0", b"2, 2", b"0,0", b"+0", b"-0", b"-1", b"0x0", b"", b" ", b"0 ;", b"0;",
                  b"99999999999999999999",
                  b"18446744073709551616", b"0\x00", b"1e0", b"0_0", b"0.0", b"0 0",
                  b"\xef\xbc\x90", b"0\x0b", b"000"):
        for name in (b"Content-Length: ", b"Content-Length : ", b"content-length:\t",
                     b"Content-Length\x00: "):
            yield f"{name!r}{value!r}", b"HTTP/1.1 200 OK\r\n" + name + value + b"\r\n\r\n" + second
    codings = (b"chunked, identity", b"identity, chunked", b"xchunked", b"chunked, chunked",
               b"\x0bchunked", b"chunked\x0b", b"\"chunked\"",
               b"chunked;q=1", b"gzip, chunked", b"chunked\x00", b",chunked", b"", b"identity",
               b"chunke\xc4\x8f")
    for coding in codings:
        for length in (b"", b"Content-Length: 0\r\n", b"Content-Length: 5\r\n"):
            yield f"coding {coding!r} {length!r}", b"HTTP/1.1 200 OK\r\n" + length + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n" + second
    for lines in (b"Content-Length: 0\r\nContent-Length: 5\r\n",
                  b"Content-Length: 5\r\nContent-Length: 0\r\n",
                  b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
                  b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
                  b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
                  b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
                  b" X: y\r\nContent-Length: 0\r\n",
                  b"\tX: y\r\nContent-Length: 0\r\n",
                  b"X : y\r\nContent-Length: 0\r\n", b"X\x00: y\r\nContent-Length: 0\r\n",
                  b"X: y\rY: z\r\nContent-Length: 0\r\n",
                  b"X: y\nContent-Length: 0\r\n", b"X: y\n\nContent-Length: 0\r\n",
                  b"X\r\nContent-Length: 0\r\n",
                  b": y\r\nContent-Length: 0\r\n", b"X: y\r\n z\r\nContent-Length: 0\r\n",
                  b"X(: y\r\nContent-Length: 0\r\n",
                  b"X: \x01\r\nContent-Length: 0\r\n", b"X\xff: y\r\nContent-Length: 0\r\n",
                  b"X: y\r\r\nContent-Length: 0\r\n",
                  b"Connection: Content-Length\r\nContent-Length: 0\r\n",
                  b"Connection: close, close\r\nContent-Length: 0\r\n",
                  b"Upgrade: x\r\nConnection: upgrade\r\nContent-Length: 0\r\n"):
        yield f"{lines!r}", b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n0\r\n\r\n" + second
    sizes = (b"0x0", b"+0", b"-0", b"0 x", b"", b"g", b"FFFFFFFFFFFFFFFFF", b"1 ", b" 1", b"1;x\n",
             b"1;\"\r\n\"", b"\xef\xbc\x91",
             b"1\x00", b"1;" + b"x" * 70_000, b"00000000000000000000001", b"1_0")
    for size in sizes:
        for end in (b"\r\n", b"\n", b"\r\r\n", b"\r"):
            body = size + end + b"Z" + end + b"0" + end + end
            yield f"chunk {size[:20]!r}{end!r}", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + second
    for trailer in (b"X: y\n\n", b"X: y\r\r\n\r\n", b"Content-Length: 40\r\n\r\n", b"X\r\n\r\n",
                    b" X: y\r\n\r\n", b"X: y\x00\r\n\r\n",
                    b"Transfer-Encoding: chunked\r\n\r\n", b"X : y\r\n\r\n", b": y\r\n\r\n",
                    b"X: " + b"y" * 100_000 + b"\r\n\r\n",
                    b"X: y\r\n" * 2_000 + b"\r\n"):
        yield f"trailer {trailer[:20]!r}", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + trailer + second
    for line in (b"HTTP/1.1 99 X", b"HTTP/1.1 1000 X", b"HTTP/1.1 2 X", b"HTTP/1.1 20 X",
                 b"HTTP/1.1 2000 X", b"HTTP/1.1 000 X",
                 b"HTTP/9.9 200 OK", b"HTTP/2.0 200 OK", b"HTTP/0.9 200 OK", b"HTTP/1.1 -200 OK",
                 b"HTTP/1.1 +200 OK", b"HTTP/1.1 2e2 OK",
                 b"HTTP 200",
                 b"HTTP/1.1200 OK", b"HTTP/1.1  200 OK", b" HTTP/1.1 200 OK", b"HTTP/1.1\t200 OK",
                 b"http/1.1 200 OK",
                 b"HTTP/1.1 200 O\x00K", b"HTTP/1.1 200 O\rK", b"HTTP/1.1 200 O\nK",
                 b"HTTP/11 200 OK", b"", b"\r\n\r\n", b"\x16\x03\x01",
                 b"ICY 200 OK",
                 b"HTTP/1.1 101 X", b"GET / HTTP/1.1"):
        yield f"{line!r}", line + b"\r\nContent-Length: 0\r\n\r\n" + second
    for framing in (b"X: y", b"Content-Length: 0", b"Content-Length: 5",
                    b"Transfer-Encoding: chunked", b"Connection: close"):
        for status in (b"204 No Content", b"304 Not Modified", b"205 Reset Content"):
            yield f"{status!r} with {framing!r}", b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n\r\n" + second
        # Responses that consist of an interim response, the final response, and surplus bytes.
        for status in (b"100 Continue", b"102 Processing", b"103 Early Hints", b"199 X"):
            yield f"{status!r} with {framing!r}", b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" + second
    yield "20,000 interim responses", b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000 + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    yield "a long head", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000 + b"\r\nContent-Length: 0\r\n\r\n"
    yield "a head without an end", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000
    yield "many lines", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5_000 + b"Content-Length: 0\r\n\r\n"
    yield "an incomplete body", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"
    yield "incomplete chunks", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"
    yield "an incomplete head", b"HTTP/1.1 200 OK\r\nX"
    yield "nothing", b""


def injected_responses(received):
    """Parses the responses in `received` strictly, and counts the injected ones."""
    injected = 0
    while b"\r\n\r\n" in received:
        head, received = received.split(b"\r\n\r\n", 1)
        injected += b"INJECTED" in head
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        status = head[9:12]
        if status[:1] == b"1" or status in (b"204", b"304"):
            continue
        if re.search(rb"(?i)\r\ntransfer-encoding: chunked", head):
            while b"\r\n" in received:
                size, received = received.split(b"\r\n", 1)
                if size == b"0":
                    received = received.split(b"\r\n", 1)[-1]
                    break
                received = received[int(size, 16) + 2:]
            else:
                return injected
        elif length:
            received = received[int(length[1]):]
        else:
            # The body ends when the connection is closed.
            return injected
    return injected


# Requests to a path that a rule denies. Mutations of each request are sent.
SEEDS = [
    DENIED,
    b"POST /denied/x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /denied/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET http://x/denied/x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /denied/x HTTP/1.0\r\nHost: x\r\n\r\n",
    b"GET /a/../denied/./x?q=1 HTTP/1.1\r\nHost: x\r\nCookie: a=b\r\n\r\n",
    b"GET /%64enied/%78 HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n",
    b"GET /s HTTP/1.1\r\nHost: x\r\n\r\nGET /denied/x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /denied/x HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"PUT /denied/x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok",
]


def path_spellings():
    """Spellings of `/pages/a`, the exact path in a rule."""
    yield from (b"/pages/%61", b"/page%73/a", b"/%70%61%67%65%73/a", b"/%70ages/a", b"//pages/a",
                b"/pages//a", b"///pages///a",
                b"/./pages/a", b"/pages/./a", b"/pages/x/../a", b"/x/../pages/a", b"/../pages/a",
                b"/pages/%2e/a", b"/pages/x/%2e%2e/a", b"/pages/x/%2E./a", b"/pages/.//a",
                b"/pages/b/c/../../a", b"/./../pages/a",
                b"/pages/a?", b"http://x/pages/a", b"http://x//pages/a", b"http://x/pages/%61",
                b"/%2e/pages/a", b"/%2e%2e/pages/a", b"/x/..//pages/a", b"/pages/../pages/a",
                b"/.//pages/a", b"/pages/x/y/../.././a")


def route_spellings():
    """Spellings of `/login` that many frameworks map to the same route."""
    yield from (b"/login/", b"/LOGIN", b"/Login", b"/login//", b"/login;x=1", b"/login;",
                b"/login/;x", b"/login%20", b"/login%20%20",
                b"/login%09", b"/lOgIn/", b"/LOGIN;x=1/", b"/%4cogin", b"/%6Cogin/", b"//login/",
                b"/./LOGIN",
                b"/x/../login/", b"/LOGIN%20", b"/login;a;b=1", b"/login/.")


def cookie_spellings():
    """Headers that an application may read as the cookie `sid=@`."""
    yield from (b"Cookie: sid=@", b"cookie:sid=@", b"COOKIE: sid=@", b"Cookie: a=b; sid=@",
                b"Cookie: sid=@; a=b", b"Cookie: a=b;sid=@",
                b"Cookie: a=b;  sid=@", b"Cookie: sid=@;", b"Cookie: ;sid=@", b"Cookie: ; ; sid=@",
                b"Cookie: a=b\r\nCookie: sid=@", b"Cookie: sid=@\r\nCookie: a=b",
                b"Cookie: sid=\"@\"", b"Cookie: sid= @",
                b"Cookie: sid =@", b"Cookie: sid=@ ", b"Cookie: \tsid=@", b"Cookie: sid=%%",
                b"Cookie: sid=%%; a=b",
                b"Cookie: a=b; sid=\"%%\"", b"Cookie: sid=x; sid=@", b"Cookie: sid=@; sid=x",
                b"Cookie: sid=x\r\nCookie: sid=@",
                b"Cookie: sid=@\r\nCookie: sid=x", b"Cookie: sid=; sid=@", b"Cookie: sid; sid=@",
                b"Cookie: a=b,sid=@",
                b"Connection: close, cookie\r\nCookie: sid=@", b"Cookie : sid=@",
                b"Cookie:\r\n sid=@",
                b"Cookie: $Version=1; sid=@; $Path=/", b"Cookie: a=\"x; sid=@\"; sid=@",
                b"Cookie: sid=@\x0b", b"Cookie: s%69d=@",
                b"Cookie: %73id=%%")


def has_session(head, session):
    """Whether an application finds the cookie `sid` with this value: names and values are trimmed,
    unquoted and decoded once."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() != b"cookie":
            continue
        for pair in value.split(b";"):
            name, _, value = pair.partition(b"=")
            if name.strip() == b"sid" and unquote_to_bytes(value.strip().strip(b'"')) == session:
                return True
    return False


def beginnings():
    """Names, and incomplete HTTP/1.1 requests after which the client stops sending."""
    head = b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\n"
    yield "nothing", b""
    for data in (b"G", b"GET", b"GET ", b"GET /hea", b"GET /healthz HTTP",
                 b"GET /healthz HTTP/1.1", b"GET /healthz HTTP/1.1\r",
                   b"GET /healthz HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\nHo",
                   b"GET /healthz HTTP/1.1\r\nHost:",
                   b"GET /healthz HTTP/1.1\r\nHost: localhost",
                   b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
                   b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r", b"\r\n", b"\r\n\r\n\r\n",
                   b"\x16\x03\x01\x02\x00\x01", head + b"X: " + b"y" * 4_000):
        yield f"head {data[-20:]!r}", data
    for data in (b"Content-Length: 9\r\n\r\n", b"Content-Length: 9\r\n\r\n{",
                 b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n",
                   b"Content-Length: 100000\r\n\r\n" + b"x" * 5_000):
        yield f"body {data[:30]!r} {len(data)}", head + data
    for data in (b"", b"5", b"5\r", b"5\r\n", b"5\r\n{\"", b"5\r\nhello", b"5\r\nhello\r\n",
                 b"5;ext", b"0", b"0\r\n", b"0\r\nX: y",
                   b"0\r\nX: y\r\n"):
        yield f"chunk {data!r}", head + b"Transfer-Encoding: chunked\r\n\r\n" + data


def resp_beginnings():
    """Names, and incomplete Redis protocol commands after which the client stops sending."""
    for data in (b"", b"P", b"PIN", b"PING", b"PING\r", b"*", b"*1", b"*1\r\n", b"*1\r\n$",
                 b"*1\r\n$4", b"*1\r\n$4\r\n",
                   b"*1\r\n$4\r\nPI", b"*1\r\n$4\r\nPING", b"*1\r\n$4\r\nPING\r",
                   b"*3\r\n$8\r\nTHROTTLE\r\n", b"\"un",
                   b"*2\r\n$4\r\nECHO\r\n$60000\r\n" + b"x" * 5_000):
        yield f"{data[:30]!r}", data
