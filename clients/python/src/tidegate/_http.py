"""The HTTP clients below `Client` and `AsyncClient`: connection pools, timeouts, errors."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Union

import httpx

from ._calls import Call, T
from ._verdict import Response
from .errors import TidegateError, Unavailable

# The server closes connections that are idle for 5 minutes. A client that closes them first never
# sends a request on a connection that the server is closing.
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

    def arguments(self) -> Dict[str, Any]:
        """Returns the arguments of an `httpx` client."""
        headers = {"user-agent": "tidegate-python"}
        if self.token is not None:
            headers["tidegate-token"] = self.token
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": self.timeout,
            # Reading the certificates of the machine takes tens of milliseconds.
            "verify": self.verify if self.url.startswith("https:") else False,
            # A forward proxy of the environment is not meant for the rate limiter.
            "trust_env": False,
            "limits": httpx.Limits(
                max_connections=self.max_connections,
                max_keepalive_connections=self.max_connections,
                keepalive_expiry=_KEEP_ALIVE_SECS,
            ),
        }


class SyncHttp:
    """Sends calls over one connection pool per process.

    After a fork, as in gunicorn with `preload_app`, parent and child must not share connections.
    The child therefore makes a pool of its own.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._client = httpx.Client(**settings.arguments())

    def send(self, call: Call[T]) -> T:
        client = self._of_this_process()
        try:
            response = client.post(call.path, json=call.body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _failure(error, self._settings) from error
        return _result(call, response)

    def close(self) -> None:
        self._client.close()

    def _of_this_process(self) -> httpx.Client:
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._client = httpx.Client(**self._settings.arguments())
                    self._pid = os.getpid()
        return self._client


class AsyncHttp:
    """Sends calls over one connection pool per event loop.

    A connection belongs to the event loop that opened it. A client is often made once per module
    and used by several loops, as in tests with Starlette's `TestClient`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._clients: weakref.WeakKeyDictionary[Any, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )
        # The client of an event loop that is not one of asyncio, such as trio's.
        self._other: Optional[httpx.AsyncClient] = None

    async def send(self, call: Call[T]) -> T:
        try:
            response = await self._of_this_loop().post(call.path, json=call.body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _failure(error, self._settings) from error
        return _result(call, response)

    async def close(self) -> None:
        """Closes the connections of the current event loop."""
        await self._of_this_loop().aclose()
        loop = _running_loop()
        if loop is None:
            self._other = None
        else:
            self._clients.pop(loop, None)

    def _of_this_loop(self) -> httpx.AsyncClient:
        loop = _running_loop()
        if loop is None:
            if self._other is None:
                self._other = httpx.AsyncClient(**self._settings.arguments())
            return self._other
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(**self._settings.arguments())
        return client


def _running_loop() -> Optional[asyncio.AbstractEventLoop]:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _failure(error: Exception, settings: Settings) -> TidegateError:
    if isinstance(error, httpx.TimeoutException):
        return Unavailable(f"{settings.url} did not answer within {settings.timeout:g} s")
    return Unavailable(f"{settings.url}: {error or type(error).__name__}")


def _result(call: Call[T], response: httpx.Response) -> T:
    return call.read(Response(response.status_code, response.headers, response.content))
