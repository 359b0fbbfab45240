"""Storages for the package `limits`, which flask-limiter, slowapi and others use.

`limits` finds a storage by its URL scheme once the storage's module is imported:

    import tidegate.limits
    from flask_limiter import Limiter

    limiter = Limiter(key, app=app, storage_uri="tidegate://127.0.0.1:8080")

The schemes are `tidegate` (HTTP) and `tidegates` (HTTPS). The prefix `async+` selects the
asynchronous storage. `tidegate://:TOKEN@host:port` sends a token.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any, Dict, Generator, Optional, Tuple, TypeVar, Union
from urllib.parse import unquote, urlsplit

from limits.aio.storage import MovingWindowSupport as AsyncMovingWindowSupport
from limits.aio.storage import Storage as AsyncStorage
from limits.aio.storage.base import (
    SlidingWindowCounterSupport as AsyncSlidingWindowCounterSupport,
)
from limits.errors import ConfigurationError
from limits.limits import GRANULARITIES
from limits.storage import MovingWindowSupport, SlidingWindowCounterSupport, Storage
from limits.storage.base import TimestampedSlidingWindow

from ._async_client import AsyncClient
from ._client import DEFAULT_MAX_CONNECTIONS, DEFAULT_TIMEOUT, Client
from ._http import Verify
from ._verdict import Verdict
from .errors import TidegateError, Unavailable

__all__ = ["AsyncTidegateStorage", "TidegateStorage"]

T = TypeVar("T")

# A limit that is never reached, for counters that the caller compares with its own limit.
_UNLIMITED = 999_999_999_999_999

# The server's longest window. A peek with it reads the count of a window of any length.
_LONGEST = "3650d"

# The server's maximum key length.
_MAX_KEY_BYTES = 1023

# A state of another algorithm replaces a key's state, so the next use of the key starts at zero.
_OTHER_KIND = {"algorithm": "gcra", "rate": "1000/s"}

# The maximum number of peeks in `get_moving_window`, if other requests change the window.
_MAX_PEEKS = 4


@dataclass(frozen=True)
class _Question:
    """One request to `/v1/throttle`."""

    key: str
    limit: Dict[str, Any]
    cost: int
    peek: bool = False


# An operation yields requests, gets a verdict for each, and returns a result. The synchronous and
# the asynchronous storage run the same operations.
_Operation = Generator[_Question, Verdict, T]


class _Keys:
    """The server's keys, one per strategy, because a key has the state of only one algorithm."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def fixed(self, key: str) -> str:
        return self._key("fixed", key)

    def moving(self, key: str) -> str:
        return self._key("moving", key)

    def sliding(self, key: str) -> str:
        return self._key("sliding", key)

    def _key(self, strategy: str, key: str) -> str:
        whole = f"{self._prefix}:{strategy}:{key}"
        encoded = whole.encode("utf-8", "surrogatepass")
        # JSON cannot contain lone surrogates, so a key with one is hashed too.
        is_text = not any("\ud800" <= character <= "\udfff" for character in whole)
        if len(encoded) <= _MAX_KEY_BYTES and is_text:
            return whole
        return f"{self._prefix}:{strategy}:sha256:{hashlib.sha256(encoded).hexdigest()}"


def _fixed_window(window: str) -> Dict[str, Any]:
    return {
        "algorithm": "fixed_window",
        "limit": _UNLIMITED,
        "window": window,
        "anchor": "first_request",
    }


def _window_of(key: str) -> str:
    """Returns the window of a key from `RateLimitItem.key_for`: `…/amount/multiples/unit`.

    `get` and `get_expiry` do not have a parameter for the window.
    """
    parts = key.rsplit("/", 2)
    if len(parts) == 3 and parts[1].isdecimal() and parts[2] in GRANULARITIES:
        return f"{int(parts[1]) * GRANULARITIES[parts[2]].GRANULARITY.seconds}s"
    return _LONGEST


def _decided(verdict: Verdict) -> Verdict:
    """Returns a verdict by a limit, and raises an exception if there was no decision."""
    if verdict.is_undecided or verdict.limit is None or verdict.remaining is None:
        raise Unavailable(verdict.describe())
    return verdict


def _spent(verdict: Verdict, cost: int) -> int:
    """Returns the number of units spent before a peek."""
    _decided(verdict)
    assert verdict.limit is not None and verdict.remaining is not None
    return max(0, verdict.limit - verdict.remaining - (cost if verdict.allowed else 0))


def _increment(key: str, expiry: int, amount: int) -> _Operation[int]:
    if amount == 0:
        return (yield from _count(key, f"{expiry}s"))
    verdict = yield _Question(key, _fixed_window(f"{expiry}s"), amount)
    return _spent(verdict, 0)


def _count(key: str, window: str) -> _Operation[int]:
    verdict = yield _Question(key, _fixed_window(window), 1, peek=True)
    return _spent(verdict, 1)


def _expiry(key: str, window: str) -> _Operation[float]:
    verdict = yield _Question(key, _fixed_window(window), 1, peek=True)
    # If no units are spent, `reset_after` belongs to the window that a request would begin.
    wait = (verdict.reset_after or 0.0) if _spent(verdict, 1) > 0 else 0.0
    return time.time() + wait


def _acquire(key: str, limit: Dict[str, Any], amount: int) -> _Operation[bool]:
    if amount == 0:
        return True
    verdict = yield _Question(key, limit, amount)
    if verdict.reason not in (None, "limit"):
        raise Unavailable(verdict.describe())
    return verdict.allowed


def _moving_window(key: str, limit: int, expiry: int) -> _Operation[Tuple[float, int]]:
    window = _log(limit, expiry)
    verdict = yield _Question(key, window, 1, peek=True)
    spent = _spent(verdict, 1)
    for _ in range(_MAX_PEEKS):
        if spent == 0:
            break
        # A request for one unit more than remains is admitted when the oldest unit expires. While
        # Redis is unreachable, the limit in the verdict is the server's local share.
        cost = max(1, (verdict.limit or limit) - spent + 1)
        verdict = yield _Question(key, window, cost, peek=True)
        now_spent = _spent(verdict, cost)
        if now_spent == spent and verdict.retry_after is not None:
            return time.time() + verdict.retry_after - expiry, spent
        spent = now_spent
    # The window is empty, or other requests changed it during each peek.
    return (time.time(), 0) if spent == 0 else (time.time() - expiry, spent)


def _log(limit: int, expiry: int) -> Dict[str, Any]:
    return {"algorithm": "sliding_window_log", "limit": limit, "window": f"{expiry}s"}


def _counter(limit: int, expiry: int) -> Dict[str, Any]:
    return {"algorithm": "sliding_window_counter", "limit": limit, "window": f"{expiry}s"}


def _sliding_window(key: str, expiry: int) -> _Operation[Tuple[int, float, int, float]]:
    verdict = yield _Question(key, _counter(_UNLIMITED, expiry), 1, peek=True)
    spent = _spent(verdict, 1)
    # The server reports only the weighted sum of both windows, so it is the current count here.
    return 0, 0.0, spent, (verdict.reset_after or 0.0)


def _clear(*keys: str) -> _Operation[None]:
    for key in keys:
        _decided((yield _Question(key, _OTHER_KIND, 1)))


def _endpoint(uri: Optional[str]) -> Tuple[str, Optional[str]]:
    """Returns the URL of the HTTP listener, and the token."""
    parts = urlsplit(uri or "")
    scheme = "https" if parts.scheme.endswith("tidegates") else "http"
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"storage URL: {error}") from None
    if host is None or port is None:
        raise ConfigurationError("storage URL: expected tidegate://host:port")
    if parts.path not in ("", "/") or parts.query:
        raise ConfigurationError("storage URL: expected no path and no query after host:port")
    if ":" in host:
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}", unquote(parts.password) if parts.password else None


class TidegateStorage(
    Storage, MovingWindowSupport, SlidingWindowCounterSupport, TimestampedSlidingWindow
):
    """The synchronous storage.

    Options: `token`, `timeout` in seconds, `max_connections`, `verify`, and `key_prefix`.
    `TimestampedSlidingWindow` declares that sliding windows begin at multiples of their length.
    """

    STORAGE_SCHEME = ["tidegate", "tidegates"]

    def __init__(
        self,
        uri: Optional[str] = None,
        wrap_exceptions: bool = False,
        *,
        key_prefix: str = "limits",
        token: Optional[str] = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        verify: Verify = True,
    ) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        url, password = _endpoint(uri)
        self._keys = _Keys(key_prefix)
        self._client = Client(
            url,
            token=token if token is not None else password,
            timeout=float(timeout),
            max_connections=max_connections,
            verify=verify,
        )

    @property
    def base_exceptions(self) -> Union[type[Exception], tuple[type[Exception], ...]]:
        return TidegateError

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Increments the counter of a fixed window, and returns its value."""
        return self._run(_increment(self._keys.fixed(key), expiry, amount))

    def get(self, key: str) -> int:
        """Returns the counter of a fixed window."""
        return self._run(_count(self._keys.fixed(key), _window_of(key)))

    def get_expiry(self, key: str) -> float:
        """Returns the end of a fixed window, in seconds since 1970."""
        return self._run(_expiry(self._keys.fixed(key), _window_of(key)))

    def check(self) -> bool:
        """Returns true if the server decides requests."""
        return self._client.is_healthy()

    def reset(self) -> Optional[int]:
        """Not supported: the server does not delete the keys of all clients."""
        raise NotImplementedError("Tidegate does not delete all keys; use clear")

    def clear(self, key: str) -> None:
        """Deletes the counts of a key for the strategies fixed window and moving window."""
        self._run(_clear(self._keys.fixed(key), self._keys.moving(key)))

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Acquires entries of a moving window."""
        return self._run(_acquire(self._keys.moving(key), _log(limit, expiry), amount))

    def get_moving_window(self, key: str, limit: int, expiry: int) -> Tuple[float, int]:
        """Returns the time of the oldest entry in a moving window, and the number of entries."""
        return self._run(_moving_window(self._keys.moving(key), limit, expiry))

    def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        """Acquires units of a sliding window counter."""
        return self._run(_acquire(self._keys.sliding(key), _counter(limit, expiry), amount))

    def get_sliding_window(self, key: str, expiry: int) -> Tuple[int, float, int, float]:
        """Returns the weighted count as the count of the current window."""
        return self._run(_sliding_window(self._keys.sliding(key), expiry))

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Deletes the counts of a sliding window."""
        self._run(_clear(self._keys.sliding(key)))

    def _run(self, operation: _Operation[T]) -> T:
        try:
            question = next(operation)
            while True:
                verdict = self._client.throttle(
                    question.key, question.limit, cost=question.cost, peek=question.peek
                )
                question = operation.send(verdict)
        except StopIteration as end:
            result: T = end.value
            return result


class AsyncTidegateStorage(
    AsyncStorage,
    AsyncMovingWindowSupport,
    AsyncSlidingWindowCounterSupport,
    TimestampedSlidingWindow,
):
    """The asynchronous storage, with the options of `TidegateStorage`."""

    STORAGE_SCHEME = ["async+tidegate", "async+tidegates"]

    def __init__(
        self,
        uri: Optional[str] = None,
        wrap_exceptions: bool = False,
        *,
        key_prefix: str = "limits",
        token: Optional[str] = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        verify: Verify = True,
    ) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        url, password = _endpoint(uri)
        self._keys = _Keys(key_prefix)
        self._client = AsyncClient(
            url,
            token=token if token is not None else password,
            timeout=float(timeout),
            max_connections=max_connections,
            verify=verify,
        )

    @property
    def base_exceptions(self) -> Union[type[Exception], tuple[type[Exception], ...]]:
        return TidegateError

    async def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Increments the counter of a fixed window, and returns its value."""
        return await self._run(_increment(self._keys.fixed(key), expiry, amount))

    async def get(self, key: str) -> int:
        """Returns the counter of a fixed window."""
        return await self._run(_count(self._keys.fixed(key), _window_of(key)))

    async def get_expiry(self, key: str) -> float:
        """Returns the end of a fixed window, in seconds since 1970."""
        return await self._run(_expiry(self._keys.fixed(key), _window_of(key)))

    async def check(self) -> bool:
        """Returns true if the server decides requests."""
        return await self._client.is_healthy()

    async def reset(self) -> Optional[int]:
        """Not supported: the server does not delete the keys of all clients."""
        raise NotImplementedError("Tidegate does not delete all keys; use clear")

    async def clear(self, key: str) -> None:
        """Deletes the counts of a key for the strategies fixed window and moving window."""
        await self._run(_clear(self._keys.fixed(key), self._keys.moving(key)))

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Acquires entries of a moving window."""
        return await self._run(_acquire(self._keys.moving(key), _log(limit, expiry), amount))

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> Tuple[float, int]:
        """Returns the time of the oldest entry in a moving window, and the number of entries."""
        return await self._run(_moving_window(self._keys.moving(key), limit, expiry))

    async def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        """Acquires units of a sliding window counter."""
        return await self._run(_acquire(self._keys.sliding(key), _counter(limit, expiry), amount))

    async def get_sliding_window(self, key: str, expiry: int) -> Tuple[int, float, int, float]:
        """Returns the weighted count as the count of the current window."""
        return await self._run(_sliding_window(self._keys.sliding(key), expiry))

    async def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Deletes the counts of a sliding window."""
        await self._run(_clear(self._keys.sliding(key)))

    async def _run(self, operation: _Operation[T]) -> T:
        try:
            question = next(operation)
            while True:
                verdict = await self._client.throttle(
                    question.key, question.limit, cost=question.cost, peek=question.peek
                )
                question = operation.send(verdict)
        except StopIteration as end:
            result: T = end.value
            return result
