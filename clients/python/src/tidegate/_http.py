"""Sends calls: urllib3 for `Client`, aiohttp for `AsyncClient`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import threading
import weakref
from dataclasses import dataclass, field
from typing import Dict, Optional, Union
from urllib.parse import urlsplit

import aiohttp
import urllib3
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as UrllibTimeout

from ._calls import Call, T
from ._verdict import Response
from .errors import TidegateError, Unavailable

# The server closes connections that are idle for 5 minutes. The client closes them earlier, so that
# it never sends a request on a connection that the server is closing.
_KEEP_ALIVE_SECS = 60.0

Verify = Union[bool, ssl.SSLContext]


@dataclass(frozen=True)
class Settings:
    """The settings of an HTTP client."""

    url: str
    token: Optional[str] = field(repr=False)
    timeout: float
    max_connections: int
    verify: Verify

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: expected http:// or https://, got {self.url!r}")
        if not self.timeout > 0:
            raise ValueError(f"timeout: expected seconds above 0, got {self.timeout!r}")

    def headers(self) -> Dict[str, str]:
        headers = {"content-type": "application/json", "user-agent": "tidegate-python"}
        if self.token is not None:
            headers["tidegate-token"] = self.token
        return headers

    def ssl_context(self) -> Optional[ssl.SSLContext]:
        if not self.url.startswith("https://"):
            return None
        if isinstance(self.verify, ssl.SSLContext):
            return self.verify
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class SyncHttp:
    """Sends calls over one connection pool per process.

    After a fork, as in gunicorn with `preload_app`, the parent and the child must not share
    connections. The child therefore creates its own pool.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._path = urlsplit(settings.url).path
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._pool = self._new_pool()

    def send(self, call: Call[T]) -> T:
        try:
            response = self._of_this_process().urlopen(
                "POST",
                self._path + call.path,
                body=_encoded(call),
                headers=self._settings.headers(),
                # A request without a response may have been charged, so it is not retried.
                retries=False,
                redirect=False,
                pool_timeout=self._settings.timeout,  # type: ignore[arg-type]
                timeout=urllib3.Timeout(total=self._settings.timeout + call.wait),
            )
        except HTTPError as error:
            raise _failure(error, isinstance(error, UrllibTimeout), self._settings, call) from error
        return call.read(Response(response.status, response.headers, response.data))

    def close(self) -> None:
        self._pool.close()

    def _of_this_process(self) -> urllib3.HTTPConnectionPool:
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._pool = self._new_pool()
                    self._pid = os.getpid()
        return self._pool

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        settings = self._settings
        context = settings.ssl_context()
        return urllib3.connection_from_url(
            settings.url,
            maxsize=settings.max_connections,
            block=True,
            **({} if context is None else {"ssl_context": context}),
        )


class AsyncHttp:
    """Sends calls over one connection pool per event loop.

    A connection belongs to the event loop that opened it. A client is often created once per module
    and used by several loops, as in tests with Starlette's `TestClient`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._context = settings.ssl_context()
        self._sessions: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, aiohttp.ClientSession
        ] = weakref.WeakKeyDictionary()

    async def send(self, call: Call[T]) -> T:
        try:
            async with self._of_this_loop().post(
                self._settings.url + call.path,
                data=_encoded(call),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._settings.timeout + call.wait),
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            is_timeout = isinstance(error, asyncio.TimeoutError)
            raise _failure(error, is_timeout, self._settings, call) from error
        return call.read(Response(response.status, response.headers, content))

    async def close(self) -> None:
        """Closes the connections of the current event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _of_this_loop(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            self._forget_closed_loops()
            session = self._sessions[loop] = self._new_session()
        return session

    def _new_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=self._settings.max_connections,
            keepalive_timeout=_KEEP_ALIVE_SECS,
            ssl=self._context if self._context is not None else True,
        )
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._settings.headers(),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _forget_closed_loops(self) -> None:
        # A session refers to its loop, so even a dictionary with weak keys would keep both.
        for loop in [loop for loop in self._sessions if loop.is_closed()]:
            _close_without_loop(self._sessions.pop(loop))

    def __del__(self) -> None:
        # Otherwise, aiohttp logs errors when a program exits without closing its client.
        self._forget_closed_loops()


def _close_without_loop(session: aiohttp.ClientSession) -> None:
    """Closes a session whose event loop is already closed. Nothing can be awaited then."""
    connector = session.connector
    session.detach()
    if connector is not None:
        with contextlib.suppress(StopIteration, RuntimeError):
            # The first step closes the connections. Later steps would need the event loop.
            next(connector.close().__await__())


def _encoded(call: Call[T]) -> bytes:
    return json.dumps(call.body).encode()


def _failure(
    error: Exception, is_timeout: bool, settings: Settings, call: Call[T]
) -> TidegateError:
    if is_timeout:
        timeout = settings.timeout + call.wait
        return Unavailable(f"{settings.url} did not answer within {timeout:g} s")
    return Unavailable(f"{settings.url}: {error or type(error).__name__}")
