"""Requests and answers over HTTP/1.1, RESP and JSON that are not what they seem."""

import re
from urllib.parse import unquote_to_bytes

from targets import request

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
    """Names and heads; `@` is replaced by a number."""
    codings = [b"chunked", b"Chunked", b" chunked", b"\tchunked", b"chunked ", b"xchunked", b"chunked, identity", b"identity, chunked", b"chunked, chunked",
               b"\"chunked\"", b"chunked;q=1", b"identity", b"gzip, chunked", b"\x0bchunked", b"chunke\xc4\x8f", b"chunked\x00", b"\r\n chunked", b",chunked", b""]
    names = [b"Transfer-Encoding: ", b"Transfer-Encoding:", b"Transfer-Encoding : ", b"transfer-encoding: ", b"Transfer_Encoding: ", b" Transfer-Encoding: ",
             b"X: y\nTransfer-Encoding: ", b"X: y\rTransfer-Encoding: ", b"Transfer-Encoding\x00: ", b"Transfer-Encoding\t: "]
    lengths = [b"", b"Content-Length: 4\r\n", b"Content-Length: 6\r\n"]
    bodies = [b"0\r\n\r\n" + HIDDEN, b"1\r\nZ\r\n0\r\n\r\n" + HIDDEN]
    for name in names:
        for coding in codings:
            for length in lengths:
                head = b"POST /s HTTP/1.1\r\nHost: x\r\n" + length + name + coding + b"\r\n\r\n"
                yield f"{name!r}{coding!r} {length!r}", head + bodies[len(coding) % 2]
    values = [b"+0", b"-0", b"0x0", b"0 ", b" 0", b"0,0", b"0, 0", b"0;", b"1e0", b"00000000000000000000", b"18446744073709551616", b"\xef\xbc\x90", b"", b"0\x0b"]
    for value in values:
        for name in (b"Content-Length: ", b"Content-Length : ", b"Content-Length\x00: ", b" Content-Length: "):
            yield f"{name!r}{value!r}", b"POST /s HTTP/1.1\r\nHost: x\r\n" + name + value + b"\r\n\r\n" + HIDDEN
    for first, second in ((b"0", b"40"), (b"40", b"0"), (b"0", b"0")):
        head = b"POST /s HTTP/1.1\r\nHost: x\r\nContent-Length: " + first + b"\r\nContent-Length: " + second + b"\r\n\r\n"
        yield f"two lengths {first!r} {second!r}", head + HIDDEN
    sizes = [b"0x1", b"+1", b"-1", b"1 ", b" 1", b"1;x\n", b"1\r", b"1\n", b"FFFFFFFFFFFFFFFFF", b"g", b"", b"1;" + b"x" * 70000, b"1;\"\r\n\"", b"\xef\xbc\x91"]
    for size in sizes:
        for end in (b"\r\n", b"\n", b"\r\r\n", b"\r"):
            body = size + end + b"Z" + end + b"0" + end + end + HIDDEN
            yield f"chunk size {size[:20]!r}{end!r}", b"POST /s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    chunked = b"POST /s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    for trailer in (b"X: y\n\n", b"X: y\r\r\n\r\n", b"Content-Length: 40\r\n\r\n", b"X\r\n\r\n", b" X: y\r\n\r\n", b"X: y\x00\r\n\r\n"):
        yield f"trailer {trailer!r}", chunked + trailer + HIDDEN
    for line in (b"GET /s HTTP/1.1\x0b", b"GET  /s HTTP/1.1", b"GET /s  HTTP/1.1", b"GET\t/s\tHTTP/1.1", b"GET /s HTTP/1.1 x", b"GET /s HTTP/1.2", b"GET /s HTTP/2.0",
                 b"GET /s", b"GET /s HTTP/0.9", b"GET /s HTTP/1.1\r\n\x20x", b"CONNECT /denied/x HTTP/1.1", b"GET /s\nGET /denied/@ HTTP/1.1"):
        yield f"{line!r}", line + b"\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    for lines in (b"Expect: 100-continue\r\nContent-Length: 5\r\n", b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n",
                  b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Connection: Content-Length\r\nContent-Length: 0\r\n", b"Connection: Host\r\n"):
        yield f"{lines!r}", b"POST /s HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n" + HIDDEN


def mutate(octets, chance):
    octets = bytearray(octets)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(octets))
        action = chance.randrange(5)
        if action == 0:
            octets[at] = chance.randrange(256)
        elif action == 1:
            del octets[at]
        elif action == 2:
            octets.insert(at, chance.choice(b"\r\n\t \x00\x0b:/;,%.\\?#\xff"))
        elif action == 3:
            octets[at:at] = octets[at:at + chance.randrange(1, 12)]
        else:
            octets[at] ^= 1 << chance.randrange(8)
        if not octets:
            return b"\r\n"
    return bytes(octets)


def is_denied(line):
    """Whether a request line asks for the denied path, as plain servers read it: decoded once, slashes merged, dots resolved."""
    parts = line.split(b" ")
    if len(parts) != 3:
        return False
    # An encoded slash is no separator, as in RFC 3986: the rules and the upstream both see it as it is.
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
    """Ways of writing a key; each is a function from the key to a request."""
    head = b"GET /k HTTP/1.1\r\nHost: x\r\n"
    for name, lines in (
        ("plain", b"X-Api-Key: @"), ("spaces", b"X-Api-Key:   @  "), ("tab", b"X-Api-Key:\t@\t"), ("upper case", b"X-API-KEY: @"),
        ("underscore", b"X_Api_Key: @"), ("underscores beside", b"X-Api-Key: other\r\nX_Api_Key: @"), ("hidden by Connection", b"Connection: close, x-api-key\r\nX-Api-Key: @"),
        ("named by Connection alone", b"Connection: x-api-key\r\nX-Api-Key: @"), ("twice", b"X-Api-Key: @\r\nX-Api-Key: @"), ("after another", b"X-Api-Key: a\r\nX-Api-Key: @"),
        ("before another", b"X-Api-Key: @\r\nX-Api-Key: a"), ("vertical tab", b"X-Api-Key: @\x0b"), ("form feed", b"X-Api-Key: \x0c@"), ("folded", b"X-Api-Key:\r\n @"),
        ("no-break space", b"X-Api-Key: \xc2\xa0@"), ("quoted name", b"\"X-Api-Key\": @"), ("name with a space", b"X-Api-Key : @"),
    ):
        yield name, lambda key, lines=lines: head + lines.replace(b"@", key) + b"\r\nConnection: close\r\n\r\n"
    yield "trailer", lambda key: head.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\nTrailer: X-Api-Key\r\n\r\n0\r\nX-Api-Key: " + key + b"\r\n\r\n"


def answers():
    """What a hostile upstream says. Whatever stands behind `INJECTED` is no part of the answer."""
    second = b"HTTP/1.1 200 INJECTED\r\nContent-Length: 8\r\n\r\nINJECTED"
    for value in (b"0, 0", b"2, 2", b"+0", b"-1", b"0x0", b"", b"0 ;", b"99999999999999999999", b"0\x00", b"1e0", b"0_0"):
        yield f"Content-Length: {value!r}", b"HTTP/1.1 200 OK\r\nContent-Length: " + value + b"\r\n\r\n" + second
    for lines in (b"Content-Length: 0\r\nContent-Length: 5\r\n", b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", b"Transfer-Encoding: chunked, identity\r\n",
                  b"Transfer-Encoding: xchunked\r\n", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b"Transfer-Encoding:\x0bchunked\r\n", b" X: y\r\nContent-Length: 0\r\n",
                  b"X : y\r\nContent-Length: 0\r\n", b"X\x00: y\r\nContent-Length: 0\r\n", b"X: y\rY: z\r\nContent-Length: 0\r\n", b"X: y\nContent-Length: 0\r\n"):
        yield f"{lines!r}", b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n0\r\n\r\n" + second
    for size in (b"0x0", b"+0", b"-0", b"0 x", b"", b"g", b"FFFFFFFFFFFFFFFFF"):
        yield f"chunk {size!r}", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n\r\n" + second
    for line in (b"HTTP/1.1 99 X", b"HTTP/1.1 1000 X", b"HTTP/1.1 2 X", b"HTTP/9.9 200 OK", b"HTTP/1.1 -200 OK", b"HTTP 200", b"", b"\x16\x03\x01", b"ICY 200 OK", b"HTTP/1.1 101 X"):
        yield f"{line!r}", line + b"\r\nContent-Length: 0\r\n\r\n" + second
    for status in (b"204 No Content", b"304 Not Modified", b"205 Reset Content"):
        yield f"{status!r} with a body", b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n" + second
    yield "20,000 interim answers", b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000 + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    yield "a long head", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000 + b"\r\nContent-Length: 0\r\n\r\n"
    yield "many lines", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5_000 + b"Content-Length: 0\r\n\r\n"
    yield "a body that breaks off", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"
    yield "chunks that break off", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"
    yield "nothing", b""


def resp():
    yield from (b"*0\r\n", b"*-1\r\n", b"*1025\r\n", b"*99999999999999999999\r\n", b"*1\r\n$-1\r\n\r\n", b"*1\r\n$99999999999\r\n", b"*1\r\n+x\r\n", b"*1\r\n$4\r\nPINGxx",
                b"*2\r\n$4\r\nECHO\r\n$70000\r\n", b"\"unbalanced\r\n", b"'\r\n", b"\x00\x00\x00\r\n", b"*1\r\n$0\r\n\r\n", b"*+1\r\n$4\r\nPING\r\n", b"*1\r\n$+4\r\nPING\r\n",
                b"* 1\r\n$4\r\nPING\r\n", b"*1\r$4\r\nPING\r\n", b"%1\r\n+a\r\n+b\r\n", b"~1\r\n+a\r\n", b">1\r\n+a\r\n", b"(1\r\n", b"#t\r\n", b"_\r\n", b"CL.THROTTLE\r\n",
                b"CL.THROTTLE k -1 1 1\r\n", b"CL.THROTTLE k 1 0 0\r\n", b"CL.THROTTLE k 99999999999999999999 1 1\r\n", b"THROTTLE k 1 1 NaN\r\n", b"TIDEGATE.CHECK a\r\n",
                b"TIDEGATE.CHECK " + b"a b " * 600 + b"\r\n", b"AUTH a b c d\r\n", b"HELLO 3 AUTH\r\n", b"HELLO 99\r\n", b"CLIENT SETNAME " + b"x" * 70000 + b"\r\n",
                b"MULTI\r\nMULTI\r\nEXEC\r\n", b"EXEC\r\n", b"CONFIG SET a b\r\n", b"DEBUG SEGFAULT\r\n", b"EVAL x 0\r\n", b"x" * 100_000, b"*1\r\n" * 2_000)


def json():
    yield from (b"", b"{", b"[]", b"null", b"1", b"\"x\"", b"{}", b"{\"entries\": 1}", b"{\"entries\": {\"a\": {}}}", b"{\"entries\": {\"a\": 1e999}}", b"{\"entries\": {\"a\": \"\\ud800\"}}",
                b"{\"key\": \"\"}", b"{\"key\": null}", b"{\"key\": \"k\", \"algorithm\": \"none\"}", b"{\"key\": \"k\", \"algorithm\": \"gcra\", \"rate\": \"0/s\"}",
                b"{\"key\": \"k\", \"algorithm\": \"gcra\", \"rate\": \"1/0s\"}", b"{\"key\": \"k\", \"algorithm\": \"gcra\", \"rate\": \"9e99/s\"}",
                b"{\"key\": \"k\", \"key\": \"l\", \"algorithm\": \"gcra\", \"rate\": \"1/s\"}", b"\xff\xfe{}", b"{\"entries\": {\"a\": \"b\"}, \"cost\": -1}",
                b"{\"entries\": {\"a\": \"b\"}, \"cost\": 1e30}", b"[" * 100_000, b"{\"a\":" * 50_000, b"{\"key\": \"" + b"k" * 100_000 + b"\"}", b"{\"entries\": {}} x",
                b"\x00", b"{\"key\": \"k\", \"algorithm\": \"fixed_window\", \"limit\": 1, \"window\": \"99999999999d\"}")
