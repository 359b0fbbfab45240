"""Middleware for ASGI applications: FastAPI, Starlette, Django, Quart, Litestar."""

from __future__ import annotations

from typing import Any, Awaitable, Callable, Dict, Mapping, MutableMapping, Optional, Sequence
from urllib.parse import quote

import anyio

from . import _middleware as shared
from ._async_client import AsyncClient
from ._middleware import ClientAddress, EntryReader, RequestHead
from ._verdict import Verdict
from .errors import InvalidRequest, Unavailable

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AsgiMiddleware:
    """Checks each HTTP request and each WebSocket handshake before the application gets it.

    - `client`: the client whose `check` decides.
    - `entries`: the entries to send: `method`, `path`, `host`, `scheme`, `ip`, `ip.exact`,
      `header.NAME`, `query.NAME`, `cookie.NAME`. Send all entries that the rules use.
    - `extra`: a function of the scope that returns more entries, such as the customer, or `None`
      if the request is not checked. It may be `async`.
    - `cost`: a function of the scope that returns the cost.
    - `trusted_proxies`: networks of proxies whose `client_header` is trusted, and `"unix"` for a
      proxy that connects over a Unix socket. By default, the client is the peer.
    """

    def __init__(
        self,
        app: App,
        client: AsyncClient,
        *,
        entries: Sequence[str] = shared.DEFAULT_ENTRIES,
        extra: Optional[Callable[[Scope], Any]] = None,
        cost: Optional[Callable[[Scope], int]] = None,
        trusted_proxies: Sequence[str] = (),
        client_header: str = "x-forwarded-for",
    ) -> None:
        self.app = app
        self._client = client
        self._reader = EntryReader(entries, ClientAddress(trusted_proxies, client_header))
        self._extra = extra
        self._cost = cost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        try:
            verdict = await self._check(scope)
        except shared.Ambiguous as error:
            await _refuse(scope, receive, send, shared.malformed(str(error)))
        except InvalidRequest as error:
            if not (error.field or "").startswith("entries"):
                raise
            # The request contains an invalid entry, for example a path with `..`.
            await _refuse(scope, receive, send, shared.malformed(error.detail))
        except Unavailable:
            await _refuse(scope, receive, send, shared.unavailable())
        else:
            await self._answer(verdict, scope, receive, send)

    async def _check(self, scope: Scope) -> Optional[Verdict]:
        entries: Dict[str, str] = self._reader.read(_head(scope))
        if self._extra is not None:
            extra = self._extra(scope)
            if hasattr(extra, "__await__"):
                extra = await extra
            if extra is None:
                return None
            entries.update(_required(extra))
        cost = 1 if self._cost is None else self._cost(scope)
        return await self._client.check(entries, cost=cost)

    async def _answer(
        self, verdict: Optional[Verdict], scope: Scope, receive: Receive, send: Send
    ) -> None:
        if verdict is None:
            await self.app(scope, receive, send)
            return
        if not verdict.allowed:
            await _refuse(scope, receive, send, shared.denial(verdict))
            return
        if verdict.delay > 0:
            await anyio.sleep(verdict.delay)
        headers = _encoded(shared.copied_headers(verdict))

        async def send_with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        await self.app(scope, receive, send_with_headers)


def _head(scope: Scope) -> RequestHead:
    peer = scope.get("client")
    return RequestHead(
        # A WebSocket handshake is a GET request.
        method=scope.get("method", "GET"),
        # The application routes by the decoded path. The server decodes a path once, so it sees
        # what the application sees.
        path=quote(scope["path"]) or "/",
        scheme=scope.get("scheme", "http"),
        query=scope.get("query_string", b"").decode("latin-1"),
        peer=peer[0] if peer else None,
        headers=[
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in scope["headers"]
        ],
    )


def _required(extra: Any) -> Mapping[str, str]:
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra: expected a mapping or None, got {type(extra).__name__}")
    return extra


def _encoded(headers: shared.HeaderList) -> Sequence[Any]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


async def _refuse(scope: Scope, receive: Receive, send: Send, refusal: shared.Refusal) -> None:
    prefix = "http.response"
    if scope["type"] == "websocket":
        # The handshake is read before it is refused, as the specification requires.
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            # 1008 is "policy violation". The client gets 403 instead of 429.
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.reason})
            return
        prefix = "websocket.http.response"
    headers = _encoded(refusal.headers)
    await send({"type": f"{prefix}.start", "status": refusal.status, "headers": headers})
    await send({"type": f"{prefix}.body", "body": refusal.body})
