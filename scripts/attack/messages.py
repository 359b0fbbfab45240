"""RESP, JSON and gRPC messages that are malformed, too large, or out of range."""


def resp():
    """Invalid commands, and incomplete commands, for which the server waits until a timeout."""
    # Invalid lengths and types.
    yield from (b"*-2\r\n", b"*1025\r\n", b"*99999999999999999999\r\n", b"*1\r\n$-1\r\n\r\n",
                b"*1\r\n$-2\r\n", b"*1\r\n$99999999999\r\n",
                b"*1\r\n+x\r\n", b"*1\r\n:4\r\n", b"*1\r\n*1\r\n$4\r\nPING\r\n",
                b"*1\r\n$4\r\nPINGxx", b"*1\r\n$4\r\nPING\r\r", b"*1\r\n$4\r\nPING\n\n",
                b"*1\r\n$3\r\nPING\r\n", b"*1\r\n$5\r\nPING\r\n",
                b"*2\r\n$4\r\nECHO\r\n$70000\r\n", b"*1\r\n$0\r\n\r\n",
                b"*+1\r\n$4\r\nPING\r\n", b"*1\r\n$+4\r\nPING\r\n", b"* 1\r\n$4\r\nPING\r\n",
                b"*1\r$4\r\nPING\r\n",
                b"*1 \r\n$4\r\nPING\r\n", b"*0x1\r\n$4\r\nPING\r\n", b"*1\r\n$ 4\r\nPING\r\n",
                b"*1\r\n$4.0\r\nPING\r\n", b"*\r\n", b"*1\r\n$\r\n", b"%1\r\n+a\r\n+b\r\n",
                b"~1\r\n+a\r\n", b">1\r\n+a\r\n", b"(1\r\n",
                b"#t\r\n", b"_\r\n", b"=5\r\ntxt:x\r\n", b"!3\r\nERR\r\n",
                b"+PING\r\n", b"-ERR\r\n", b":1\r\n", b"$4\r\nPING\r\n", b"*1\r\n" * 2_000,
                b"*1\r\n$18446744073709551616\r\n",
                b"*1\r\n$-0\r\nPING\r\n", b"*-0\r\n")
    # Inline commands.
    yield from (b"\"unbalanced\r\n", b"'\r\n", b"PING \"a\"b\r\n", b"PING \"\\xzz\r\n",
                b"\x00\x00\x00\r\n", b"\xff\xfe\r\n",
                b"x" * 100_000, b"PING" + b" a" * 40_000 + b"\r\n", b"\r" * 70_000)
    # Arguments.
    yield from (b"CL.THROTTLE\r\n", b"CL.THROTTLE k\r\n", b"CL.THROTTLE k -1 1 1\r\n",
                b"CL.THROTTLE k 1 0 0\r\n",
                b"CL.THROTTLE k 1 1 -1\r\n", b"CL.THROTTLE k 99999999999999999999 1 1\r\n",
                b"CL.THROTTLE k 1 1 99999999999999999999\r\n", b"CL.THROTTLE k 1.5 1 1\r\n",
                b"CL.THROTTLE k 1 1 1 -1\r\n",
                b"CL.THROTTLE k 1 1 1 1 1\r\n", b"CL.THROTTLE " + b"k" * 70_000 + b" 1 1 1\r\n",
                b"THROTTLE k 1 1 NaN\r\n", b"THROTTLE k 1e9 1 1\r\n",
                b"THROTTLE k 1 1 1 99999999999999999999\r\n",
                b"THROTTLE k 0x1 1 1\r\n", b"TIDEGATE.CHECK a\r\n",
                b"TIDEGATE.CHECK COST 0x1 a b\r\n",
                b"TIDEGATE.CHECK COST -1 a b\r\n", b"TIDEGATE.CHECK " + b"a b " * 600 + b"\r\n",
                b"TIDEGATE.CHECK a " + b"v" * 60_000 + b"\r\n", b"AUTH a b c d\r\n",
                b"HELLO 3 AUTH\r\n", b"HELLO 99\r\n", b"HELLO x\r\n",
                b"CLIENT SETNAME " + b"x" * 70_000 + b"\r\n", b"CLIENT REPLY MAYBE\r\n",
                b"MULTI\r\nMULTI\r\nEXEC\r\n", b"EXEC\r\n",
                b"DISCARD\r\n", b"SELECT 16\r\n", b"SELECT -1\r\n", b"SELECT x\r\n",
                b"CONFIG SET a b\r\n", b"DEBUG SEGFAULT\r\n", b"EVAL x 0\r\n", b"SCRIPT FLUSH\r\n",
                b"FLUSHALL\r\n", b"SHUTDOWN NOSAVE\r\n",
                b"SLAVEOF h 1\r\n", b"MODULE LOAD x\r\n", b"KEYS *\r\n", b"MONITOR\r\n",
                b"SUBSCRIBE x\r\n")


def json():
    """Bodies that the server must reject."""
    gcra = b'{"key": "k", "algorithm": "gcra", "rate": "%s", "burst": 1}'
    # Not JSON.
    yield from (b"", b"{", b"}", b"{}}", b"{\"a\"", b"{\"a\":", b"{\"a\": 1,}", b"{a: 1}",
                b"{'a': 1}", b"\x00", b"\xff\xfe{}",
                b"\xef\xbb\xbf{}", b"{\"entries\": {}} x", b"{\"entries\": {\"a\": \"\\ud800\"}}",
                b"{\"entries\": {\"a\": \"\\x\"}}", b"{\"entries\": {\"a\": \"\n\"}}",
                b"{\"entries\": {\"a\": 01}}",
                b"{\"entries\": {\"a\": NaN}}", b"[" * 100_000, b"{\"a\":" * 50_000)
    # JSON whose types or fields differ from those of a request.
    yield from (b"[]", b"null", b"1", b"\"x\"", b"true", b"{}", b"[{}]", b"{\"entries\": 1}",
                b"{\"entries\": []}", b"{\"entries\": null}",
                b"{\"entries\": {\"a\": {}}}", b"{\"entries\": {\"a\": []}}",
                b"{\"entries\": {\"a\": 1e999}}", b"{\"entries\": {\"a\": \"b\"}, \"cost\": -1}",
                b"{\"entries\": {\"a\": \"b\"}, \"cost\": 1e30}",
                b"{\"entries\": {\"a\": \"b\"}, \"cost\": 1.5}",
                b"{\"entries\": {\"a\": \"b\"}, \"cost\": \"1\"}",
                b"{\"entries\": {\"" + b"n" * 70_000 + b"\": \"b\"}}",
                b"{\"entries\": {\"a\": \"" + b"v" * 300_000 + b"\"}}",
                b"{\"entries\": {" + b", ".join(b"\"e%d\": \"v\"" % number for number in range(2_000)) + b"}}")
    # Limits out of range.
    yield from (b"{\"key\": \"\"}", b"{\"key\": null}", b"{\"key\": 1}", b"{\"key\": \"k\"}",
                b"{\"key\": \"k\", \"algorithm\": \"none\"}",
                b"{\"key\": \"k\", \"algorithm\": 1}",
                b"{\"key\": \"k\", \"key\": \"l\", \"algorithm\": \"gcra\", \"rate\": \"1/s\"}",
                b"{\"key\": \"" + b"k" * 100_000 + b"\"}",
                b"{\"key\": \"k\", \"algorithm\": \"fixed_window\", \"limit\": 1, \"window\": \"99999999999d\"}",
                b"{\"key\": \"k\", \"algorithm\": \"fixed_window\", \"limit\": -1, \"window\": \"1d\"}",
                b"{\"key\": \"k\", \"algorithm\": \"fixed_window\", \"limit\": 1, \"window\": \"0s\"}",
                b"{\"key\": \"k\", \"algorithm\": \"fixed_window\", \"limit\": 18446744073709551616, \"window\": \"1d\"}")
    yield from (gcra % rate for rate in (b"0/s", b"1/0s", b"9e99/s", b"-1/s", b"1/", b"/s",
                                         b"1/s/s", b"1 / s x", b"\\u0000/s",
                                         b"1/1000000d"))


def varint(number):
    data = bytearray()
    while number >= 128:
        data.append(number % 128 | 128)
        number //= 128
    data.append(number)
    return bytes(data)


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def grpc():
    """Payloads of DATA frames that are not valid requests to Envoy's rate limit service."""
    def message(body, flags=0, length=None):
        return bytes((flags,)) + (len(body) if length is None else length).to_bytes(4, "big") + body

    entry = field(1, b"user") + field(2, b"u")
    valid = field(1, b"shop") + field(2, field(1, entry))
    # The framing of gRPC.
    yield from (b"", b"\0", b"\0\0\0\0", message(b"", length=2**32 - 1), message(b"", flags=1),
                message(b"", flags=2),
                message(b"", flags=255), message(valid, flags=1),
                message(valid, length=len(valid) + 1), message(valid, length=len(valid) - 1),
                message(valid) + message(valid),
                message(valid) + b"\0", b"x" * 10_000,
                message(b"", length=4 << 20) + b"x" * 1_000, message(b"\0" * 8_000))
    # Protocol Buffers.
    yield from map(message, (
        b"abcde", b"\x0a\xff", b"\x0a", b"\x0a\x09" + b"\xff" * 9, b"\x0a\x02\xff\xfe",
        varint(1 << 3 | 0) + b"\1",
        varint(1 << 3 | 5) + b"\0\0\0\0", varint(0), b"\x07", b"\x0f", b"\xff" * 11,
        b"\x80" * 20, field(2, b"\xff"), field(2, b"\x0a\x7f"),
        field(2, field(1, field(1, b"\xff"))), field(2, field(1, b"\x0a")),
        b"\x0b" * 2_000, field(2, b"\x0c"),
        varint(3 << 3 | 0) + b"\xff" * 10 + b"\1", varint(2**29 << 3 | 2) + b"\0",
        field(1, b"\xc3\x28"),
        field(2, field(1, field(2, b"\xed\xa0\x80"))),
    ))
    # Larger than the service accepts.
    yield from map(message, (field(1, b"d" * 6_000) + field(2, field(1, entry)), field(1,
        b"shop") + field(2, field(1, entry)) * 1_000,
                             field(1, b"shop") + field(2, field(1, entry) * 800)))
