"""The synchronous client."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Optional, Type

from . import _calls as calls
from ._calls import Call, Duration, Entries, FailureLog, Limit, logger
from ._http import Settings, SyncHttp, Verify
from ._reservation import ReservationState
from ._verdict import Renewal, Reserved, Settlement, Verdict
from .errors import NotOutstanding, TidegateError, Unavailable

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_TIMEOUT = 1.0
DEFAULT_MAX_CONNECTIONS = 100
DEFAULT_TTL = 60.0


class Client:
    """A client for a Tidegate server. It can be used from several threads.

    - `url`: the URL of the server's HTTP listener.
    - `token`: the listener's token (`listen.http.token`), sent as `Tidegate-Token`.
    - `timeout`: the timeout in seconds of each step: waiting for a free connection, connecting, and
      waiting for data. In an `AsyncClient`, it applies to the whole call.
    - `on_failure`: if the server does not decide, `"raise"` raises `Unavailable`, `"open"` allows
      the request, and `"closed"` denies it. An invalid request or token always raises an exception.
    - `verify`: an `ssl.SSLContext`, for a private certificate authority or a client certificate.
    """

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
        self._http = SyncHttp(Settings(url.rstrip("/"), token, timeout, max_connections, verify))
        self._failures = FailureLog(url)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def check(
        self, entries: Entries, *, cost: int = 1, raw: bool = False, wait: float = 0
    ) -> Verdict:
        """Decides a request by the server's rules, and charges it if it is allowed.

        `wait` is the maximum time in seconds, at most 60, to wait for a slot of a `concurrency`
        limit with `wait`. It is added to the timeout of the client.
        """
        return self._decide(calls.check(entries, cost, raw, wait))

    def peek(self, entries: Entries, *, cost: int = 1, raw: bool = False) -> Verdict:
        """Returns the same verdict as `check`, without charging the request."""
        return self._decide(calls.peek(entries, cost, raw))

    def throttle(self, key: str, limit: Limit, *, cost: int = 1, peek: bool = False) -> Verdict:
        """Decides a request by a limit that is part of the request.

        `limit` is a limit in the notation of the rules file, such as `"20/min"`, a mapping such as
        `{"algorithm": "gcra", "rate": "100/s", "burst": 5}`, or a list of limits.
        """
        return self._decide(calls.throttle(key, limit, cost, peek))

    def reserve(
        self,
        entries: Entries,
        *,
        cost: int = 1,
        ttl: Duration = DEFAULT_TTL,
        raw: bool = False,
        wait: float = 0,
        on_error: str = "cancel",
    ) -> Reservation:
        """Charges an estimate, which `Reservation.settle` corrects. `ttl` is in seconds, and `wait`
        is the same as for `check`.

        A `with` statement settles the reservation at its end. If the body raises an exception,
        `on_error` applies: `"cancel"` refunds the whole cost, `"settle"` settles the reservation as
        without an exception, and `"keep"` lets it expire.
        """
        on_error = calls.require_policy("on_error", on_error, calls.ERROR_POLICIES)
        call = calls.reserve(entries, cost, ttl, raw, wait)
        try:
            reserved = self._send(call)
        except Unavailable as error:
            reserved = Reserved(self._verdict_of_failure(error), None)
        return Reservation(self, reserved, cost, on_error)

    def settle(self, token: str, cost: int) -> Settlement:
        """Settles a reservation by its token. After a failure, the call is repeated."""
        return self._settle(token, cost, None)

    def renew(self, token: str, ttl: Duration = DEFAULT_TTL) -> Renewal:
        """Renews a reservation. The new token replaces the old one."""
        return self._send(calls.renew(token, ttl))

    def is_healthy(self) -> bool:
        """Returns true if the server can decide requests. Does not charge anything."""
        try:
            return not self._send(calls.probe()).is_undecided
        except Unavailable:
            return False

    def _settle(self, token: str, cost: int, reserved: Optional[int]) -> Settlement:
        call = calls.settle(token, cost)
        for pause in calls.SETTLE_PAUSES:
            try:
                return self._send(call)
            except Unavailable:
                time.sleep(pause)
            except NotOutstanding:
                if pause == calls.SETTLE_PAUSES[0]:
                    raise
                return calls.assumed_settlement(cost, reserved)
        try:
            return self._send(call)
        except NotOutstanding:
            return calls.assumed_settlement(cost, reserved)

    def _decide(self, call: Call[Verdict]) -> Verdict:
        try:
            return self._send(call)
        except Unavailable as error:
            return self._verdict_of_failure(error)

    def _send(self, call: Call[calls.T]) -> calls.T:
        result = self._http.send(call)
        self._failures.answered()
        return result

    def _verdict_of_failure(self, error: Unavailable) -> Verdict:
        if self.on_failure == "raise":
            raise error
        self._failures.failed(error, self.on_failure)
        return Verdict.of_failure(allowed=self.on_failure == "open")


class Reservation(ReservationState):
    """A reserved cost, which is settled once. It is true in a boolean context if allowed."""

    def __init__(self, client: Client, reserved: Reserved, cost: int, on_error: str) -> None:
        super().__init__(reserved, cost, on_error)
        self._client = client

    def settle(self, cost: Optional[int] = None) -> Optional[Settlement]:
        """Settles at `cost`, by default at the attribute `cost`.

        Returns `None` if there is nothing to settle: the request was denied, the server was not
        reached, or the reservation was already settled.
        """
        if self.token is None:
            return None
        final = self.cost if cost is None else cost
        try:
            settlement = self._client._settle(self.token, final, self.reserved)
        except NotOutstanding:
            self.token = None
            raise
        # After any other exception, the token stays, so that the caller can settle again.
        self.token = None
        return settlement

    def cancel(self) -> Optional[Settlement]:
        """Refunds the whole cost."""
        return self.settle(0)

    def renew(self, ttl: Duration = DEFAULT_TTL) -> None:
        """Lets the reservation expire `ttl` seconds from now."""
        if self.token is not None:
            self._replace(self._client.renew(self.token, ttl))

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        cost = self._final_cost(kind is not None)
        if cost is None:
            return
        try:
            self.settle(cost)
        except TidegateError as problem:
            # An exception in the body is more important than an exception in the settlement.
            if kind is None and self._client.on_failure == "raise":
                raise
            logger.warning("a reservation was not settled: %s", problem)
