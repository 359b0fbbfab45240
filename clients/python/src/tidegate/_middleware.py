"""Code shared by the ASGI and WSGI middleware: request entries, and responses to denials."""

from __future__ import annotations

import http
import ipaddress
import json
import math
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union
from urllib.parse import parse_qsl

from ._calls import logger
from ._verdict import Verdict

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
HeaderList = List[Tuple[str, str]]

DEFAULT_ENTRIES = ("method", "path", "host", "ip")

_PLAIN = ("method", "path", "host", "scheme", "ip", "ip.exact")
_PARTS = ("header.", "query.", "cookie.")
_PROBLEM_TYPES = "https://iana.org/assignments/http-problem-types#"

# The address of a client on a Unix socket, which must be on this machine.
_LOCAL = "127.0.0.1"


class Ambiguous(Exception):
    """A value used by rules occurs several times. The service could use a different value."""


@dataclass(frozen=True)
class RequestHead:
    """A request head, independent of the server interface. Header names are in lower case."""

    method: str
    path: str
    scheme: str
    query: str
    peer: Optional[str]
    headers: Sequence[Tuple[str, str]]

    def header(self, name: str) -> Optional[str]:
        values = [value for given, value in self.headers if given == name]
        if len(values) > 1:
            raise Ambiguous(f"the header {name} occurs several times")
        return values[0].strip() if values else None

    def query_parameter(self, name: str) -> Optional[str]:
        pairs = parse_qsl(self.query, keep_blank_values=True)
        values = [value for given, value in pairs if given == name]
        if len(values) > 1:
            raise Ambiguous(f"the query parameter {name} occurs several times")
        return values[0] if values else None

    def cookie(self, name: str) -> Optional[str]:
        pairs = [
            pair.strip().partition("=")
            for given, value in self.headers
            if given == "cookie"
            for pair in value.split(";")
        ]
        values = [value for given, _, value in pairs if given.strip() == name]
        if len(values) > 1:
            raise Ambiguous(f"the cookie {name} occurs several times")
        if not values:
            return None
        try:
            morsel = SimpleCookie(f"v={values[0]}").get("v")
        except CookieError:
            return values[0]
        return morsel.value if morsel is not None else values[0]


class ClientAddress:
    """Finds the address of the client.

    Without trusted proxies, this is the peer's address. If the peer is a trusted proxy, the header
    is read from right to left, and trusted proxies are skipped. The first address that is not a
    trusted proxy is the client's address. Addresses to its left may be forged.
    """

    def __init__(self, trusted_proxies: Sequence[str], header: str) -> None:
        self._trusts_unix = "unix" in trusted_proxies
        self._trusted: Tuple[Network, ...] = tuple(
            _network(proxy) for proxy in trusted_proxies if proxy != "unix"
        )
        self._header = header.lower()
        if self._header == "forwarded":
            raise ValueError("client_header: the header Forwarded (RFC 7239) is not supported")
        self._has_warned = False

    def of(self, head: RequestHead) -> str:
        peer = parse_address(head.peer or "")
        if peer is None:
            return self._of_unix_peer(head)
        if not self._is_trusted(peer):
            return str(peer)
        return str(self._forwarded(head, peer))

    def _of_unix_peer(self, head: RequestHead) -> str:
        local = ipaddress.ip_address(_LOCAL)
        if self._trusts_unix:
            return str(self._forwarded(head, local))
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "requests come over a Unix socket, so all clients count as %s; if a proxy "
                'sends them, add "unix" to trusted_proxies',
                _LOCAL,
            )
        return _LOCAL

    def _forwarded(self, head: RequestHead, peer: Address) -> Address:
        values = [value for name, value in head.headers if name == self._header]
        nearest = peer
        for part in reversed(",".join(values).split(",")):
            address = parse_address(part.strip())
            if address is None:
                # A trusted proxy did not send a valid address.
                return nearest
            nearest = address
            if not self._is_trusted(address):
                return address
        return nearest

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f'trusted_proxies: expected networks or "unix": {error}') from None


def parse_address(text: str) -> Optional[Address]:
    """Parses an address, with or without a port. An IPv4-mapped address becomes an IPv4 address."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


class EntryReader:
    """Reads the entries of a request, with the same names as in forward auth."""

    def __init__(self, names: Sequence[str], address: ClientAddress) -> None:
        for name in names:
            is_part = any(name.startswith(part) and name != part for part in _PARTS)
            if name not in _PLAIN and not is_part:
                known = ", ".join(_PLAIN + tuple(f"{part}NAME" for part in _PARTS))
                raise ValueError(f"entries: unknown entry {name!r}; expected {known}")
        self._names = tuple(names)
        self._address = address

    def read(self, head: RequestHead) -> Dict[str, str]:
        entries = {}
        for name in self._names:
            value = self._value(name, head)
            if value:
                entries[name] = value
        return entries

    def _value(self, name: str, head: RequestHead) -> Optional[str]:
        if name in ("ip", "ip.exact"):
            return self._address.of(head)
        kind, _, part = name.partition(".")
        readers: Dict[str, Callable[[], Optional[str]]] = {
            "method": lambda: head.method,
            "path": lambda: head.path,
            "scheme": lambda: head.scheme,
            "host": lambda: head.header("host"),
            "header": lambda: head.header(part.lower()),
            "query": lambda: head.query_parameter(part),
            "cookie": lambda: head.cookie(part),
        }
        return readers[kind]()


@dataclass(frozen=True)
class Refusal:
    """A response with a problem document (RFC 9457)."""

    status: int
    headers: HeaderList
    body: bytes

    @property
    def reason(self) -> str:
        return http.HTTPStatus(self.status).phrase


def denial(verdict: Verdict) -> Refusal:
    """Returns the response to a denied request: 429, or 503 if there was no decision.

    It does not contain the rule name, because rule names may be confidential.
    """
    status, kind = 429, "quota-exceeded"
    if verdict.is_undecided:
        status, kind = 503, "temporary-reduced-capacity"
    elif verdict.reason == "blocked":
        kind = "abnormal-usage-detected"
    policies = [
        limit.policy for limit in verdict.limits if not limit.allowed and not limit.shadow
    ]
    document: Dict[str, object] = {
        "type": _PROBLEM_TYPES + kind,
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": _detail(verdict, policies),
    }
    if policies:
        document["violated-policies"] = policies
    wait = verdict.retry_after
    document["retry_after_ms"] = None if wait is None else math.ceil(wait * 1000)
    headers = copied_headers(verdict)
    if wait is not None and not any(name == "retry-after" for name, _ in headers):
        headers.append(("retry-after", str(max(1, math.ceil(wait)))))
    return _problem(status, document, headers)


def malformed(detail: str) -> Refusal:
    """Returns the response to a request that cannot be counted."""
    document = {"title": http.HTTPStatus(400).phrase, "status": 400, "detail": detail}
    return _problem(400, document, [])


def unavailable() -> Refusal:
    """Returns the response if the client raised `Unavailable`."""
    return denial(Verdict.of_failure(allowed=False))


def copied_headers(verdict: Verdict) -> HeaderList:
    return list(verdict.headers.items())


def _detail(verdict: Verdict, policies: Sequence[str]) -> str:
    if verdict.retry_after is None:
        again = "retrying will not succeed"
    else:
        again = f"retry in {max(1, math.ceil(verdict.retry_after))} s"
    if verdict.is_undecided:
        return f"the limiter could not decide; {again}"
    if verdict.reason == "blocked":
        return f"blocked; {again}"
    exceeded = f"{policies[0]} exceeded" if policies else "limit exceeded"
    return f"{exceeded}; {again}"


def _problem(status: int, document: Mapping[str, object], headers: HeaderList) -> Refusal:
    body = json.dumps(document).encode()
    own = [("content-type", "application/problem+json"), ("content-length", str(len(body)))]
    return Refusal(status, own + headers, body)
