"""The asynchronous client, for asyncio."""

from __future__ import annotations

from types import TracebackType
from typing import Generator, Optional, Type

import anyio

from . import _calls as calls
from ._calls import Call, Duration, Entries, FailureLog, Limit, logger
from ._client import DEFAULT_MAX_CONNECTIONS, DEFAULT_TIMEOUT, DEFAULT_TTL, DEFAULT_URL
from ._http import AsyncHttp, Settings, Verify
from ._reservation import ReservationState
from ._verdict import Renewal, Reserved, Settlement, Verdict
from .errors import NotOutstanding, TidegateError, Unavailable


class AsyncClient:
    """The asynchronous form of `Client`, with the same arguments and methods."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: Optional[str] = None,
        timeout: float = DEFAULT_TIMEOUT,
        on_failure: str = "raise",
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        verify: Verify = True,
    ) -> None:
        self.on_failure = calls.require_policy("on_failure", on_failure, calls.POLICIES)
        self._http = AsyncHttp(Settings(url.rstrip("/"), token, timeout, max_connections, verify))
        self._failures = FailureLog(url)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections of the current event loop."""
        await self._http.close()

    async def check(
        self, entries: Entries, *, cost: int = 1, raw: bool = False, wait: float = 0
    ) -> Verdict:
        """Decides a request by the server's rules, like `Client.check`."""
        return await self._decide(calls.check(entries, cost, raw, wait))

    async def peek(self, entries: Entries, *, cost: int = 1, raw: bool = False) -> Verdict:
        """Returns the same verdict as `check`, without charging the request."""
        return await self._decide(calls.peek(entries, cost, raw))

    async def throttle(
        self, key: str, limit: Limit, *, cost: int = 1, peek: bool = False
    ) -> Verdict:
        """Decides a request by a limit that is part of the request, like `Client.throttle`."""
        return await self._decide(calls.throttle(key, limit, cost, peek))

    def reserve(
        self,
        entries: Entries,
        *,
        cost: int = 1,
        ttl: Duration = DEFAULT_TTL,
        raw: bool = False,
        wait: float = 0,
        on_error: str = "cancel",
    ) -> PendingReservation:
        """Charges an estimate, like `Client.reserve`.

        Use it as `async with client.reserve(…) as reservation`, or `await client.reserve(…)`.
        """
        on_error = calls.require_policy("on_error", on_error, calls.ERROR_POLICIES)
        return PendingReservation(self, calls.reserve(entries, cost, ttl, raw, wait), cost, on_error)

    async def settle(self, token: str, cost: int) -> Settlement:
        """Settles a reservation by its token. After a failure, the call is repeated."""
        return await self._settle(token, cost, None)

    async def renew(self, token: str, ttl: Duration = DEFAULT_TTL) -> Renewal:
        """Renews a reservation. The new token replaces the old one."""
        return await self._send(calls.renew(token, ttl))

    async def is_healthy(self) -> bool:
        """Returns true if the server can decide requests. Does not charge anything."""
        try:
            return not (await self._send(calls.probe())).is_undecided
        except Unavailable:
            return False

    async def _settle(self, token: str, cost: int, reserved: Optional[int]) -> Settlement:
        call = calls.settle(token, cost)
        for pause in calls.SETTLE_PAUSES:
            try:
                return await self._send(call)
            except Unavailable:
                await anyio.sleep(pause)
            except NotOutstanding:
                if pause == calls.SETTLE_PAUSES[0]:
                    raise
                return calls.assumed_settlement(cost, reserved)
        try:
            return await self._send(call)
        except NotOutstanding:
            return calls.assumed_settlement(cost, reserved)

    async def _decide(self, call: Call[Verdict]) -> Verdict:
        try:
            return await self._send(call)
        except Unavailable as error:
            return self._verdict_of_failure(error)

    async def _send(self, call: Call[calls.T]) -> calls.T:
        result = await self._http.send(call)
        self._failures.answered()
        return result

    def _verdict_of_failure(self, error: Unavailable) -> Verdict:
        if self.on_failure == "raise":
            raise error
        self._failures.failed(error, self.on_failure)
        return Verdict.of_failure(allowed=self.on_failure == "open")


class PendingReservation:
    """A reservation that is created when it is awaited, or at the start of `async with`."""

    def __init__(
        self, client: AsyncClient, call: Call[Reserved], cost: int, on_error: str
    ) -> None:
        self._client = client
        self._call = call
        self._cost = cost
        self._on_error = on_error
        self._made: Optional[AsyncReservation] = None

    def __await__(self) -> Generator[object, None, AsyncReservation]:
        return self._make().__await__()

    async def __aenter__(self) -> AsyncReservation:
        self._made = await self._make()
        return self._made

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, traceback)

    async def _make(self) -> AsyncReservation:
        try:
            reserved = await self._client._send(self._call)
        except Unavailable as error:
            reserved = Reserved(self._client._verdict_of_failure(error), None)
        return AsyncReservation(self._client, reserved, self._cost, self._on_error)


class AsyncReservation(ReservationState):
    """The asynchronous form of `Reservation`."""

    def __init__(self, client: AsyncClient, reserved: Reserved, cost: int, on_error: str) -> None:
        super().__init__(reserved, cost, on_error)
        self._client = client

    async def settle(self, cost: Optional[int] = None) -> Optional[Settlement]:
        """Settles at `cost`, by default at the attribute `cost`, like `Reservation.settle`."""
        if self.token is None:
            return None
        final = self.cost if cost is None else cost
        try:
            settlement = await self._client._settle(self.token, final, self.reserved)
        except NotOutstanding:
            self.token = None
            raise
        # After any other exception, the token stays, so that the caller can settle again.
        self.token = None
        return settlement

    async def cancel(self) -> Optional[Settlement]:
        """Refunds the whole cost."""
        return await self.settle(0)

    async def renew(self, ttl: Duration = DEFAULT_TTL) -> None:
        """Lets the reservation expire `ttl` seconds from now."""
        if self.token is not None:
            self._replace(await self._client.renew(self.token, ttl))

    async def __aenter__(self) -> AsyncReservation:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        cost = self._final_cost(kind is not None)
        if cost is None:
            return
        try:
            # A cancelled task must settle too. The timeout of each attempt bounds the wait.
            with anyio.CancelScope(shield=True):
                await self.settle(cost)
        except TidegateError as problem:
            # An exception in the body is more important than an exception in the settlement.
            if kind is None and self._client.on_failure == "raise":
                raise
            logger.warning("a reservation was not settled: %s", problem)
