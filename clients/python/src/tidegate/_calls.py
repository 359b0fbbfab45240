"""The calls of the HTTP API: their paths, bodies, and functions that parse the responses.

`Client` and `AsyncClient` share this module, which does no I/O.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Dict, Generic, Mapping, Optional, Sequence, TypeVar, Union

from ._verdict import (
    Renewal,
    Reserved,
    Response,
    Settlement,
    Verdict,
    read_renewal,
    read_reserved,
    read_settlement,
    read_verdict,
)

T = TypeVar("T")

Entries = Mapping[str, str]
Duration = Union[str, float, timedelta]
Limit = Union[str, Mapping[str, Any], Sequence[Union[str, Mapping[str, Any]]]]

# The policies for an unreachable server.
POLICIES = ("open", "closed", "raise")

# What happens to a reservation if the body of a `with` statement raises an exception.
ERROR_POLICIES = ("cancel", "settle", "keep")

# The delays before the retries of a settlement. Retries are safe, because it takes effect once.
SETTLE_PAUSES = (0.05, 0.2)

logger = logging.getLogger("tidegate")


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request to the server, and the function that parses the response."""

    path: str
    body: Dict[str, Any]
    read: Callable[[Response], T]
    # How long the server may hold back its response, in seconds. Extends the client's timeout.
    wait: float = 0.0


def check(entries: Entries, cost: int, raw: bool, wait: float) -> Call[Verdict]:
    body = _described(entries, cost, raw)
    return Call("/v1/check", _waiting(body, wait), read_verdict, wait)


def peek(entries: Entries, cost: int, raw: bool) -> Call[Verdict]:
    return Call("/v1/peek", _described(entries, cost, raw), read_verdict)


def throttle(key: str, limit: Limit, cost: int, is_peek: bool) -> Call[Verdict]:
    if not isinstance(key, str):
        raise TypeError(f"key: expected a string, got {type(key).__name__}")
    body: Dict[str, Any] = {"key": key, "cost": _cost(cost)}
    if is_peek:
        body["peek"] = True
    if isinstance(limit, str):
        body["limits"] = [limit]
    elif isinstance(limit, Mapping):
        body.update(limit)
    else:
        body["limits"] = list(limit)
    return Call("/v1/throttle", body, read_verdict)


def probe() -> Call[Verdict]:
    """A call that does not charge anything and does not need any rules."""
    return throttle("tidegate-probe", "1/s", 1, True)


def reserve(
    entries: Entries, cost: int, ttl: Duration, raw: bool, wait: float
) -> Call[Reserved]:
    body = _described(entries, cost, raw)
    body["ttl"] = duration(ttl)
    return Call("/v1/reserve", _waiting(body, wait), read_reserved, wait)


def settle(token: str, cost: int) -> Call[Settlement]:
    body = {"reservation": token, "cost": _cost(cost)}
    return Call("/v1/settle", body, read_settlement)


def renew(token: str, ttl: Duration) -> Call[Renewal]:
    return Call("/v1/renew", {"reservation": token, "ttl": duration(ttl)}, read_renewal)


def duration(value: Duration) -> str:
    """Returns a duration in the server's notation. Numbers are in seconds."""
    if isinstance(value, str):
        return value
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"ttl: expected seconds, a timedelta or a string, got {value!r}")
    # Rounded up, so that a reservation never expires early.
    return f"{int(-(-value * 1000 // 1))}ms"


def require_policy(name: str, value: str, policies: Sequence[str]) -> str:
    if value not in policies:
        expected = ", ".join(repr(policy) for policy in policies)
        raise ValueError(f"{name}: expected one of {expected}, got {value!r}")
    return value


class FailureLog:
    """Logs when a server becomes unreachable and when it responds again, but not every failure."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_failing = False

    def failed(self, error: Exception, policy: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            logger.warning(
                "no decision: %s; on_failure=%s applies to this and further failures",
                error,
                policy,
            )

    def answered(self) -> None:
        if self._is_failing:
            self._is_failing = False
            logger.warning("%s answers again", self._url)


def _described(entries: Entries, cost: int, raw: bool) -> Dict[str, Any]:
    for name, value in entries.items():
        if not isinstance(value, str):
            raise TypeError(f"entries[{name!r}]: expected a string, got {type(value).__name__}")
    body: Dict[str, Any] = {"entries": dict(entries), "cost": _cost(cost)}
    if raw:
        body["raw"] = True
    return body


def _waiting(body: Dict[str, Any], wait: float) -> Dict[str, Any]:
    """Adds the maximum wait for a slot to a body. The server rejects more than a minute."""
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < math.inf:
        raise ValueError(f"wait: expected seconds from 0 to 60, got {wait!r}")
    if wait > 0:
        body["wait_ms"] = math.ceil(wait * 1000)
    return body


def _cost(cost: int) -> int:
    if isinstance(cost, bool) or not isinstance(cost, int):
        raise TypeError(f"cost: expected a whole number, got {cost!r}")
    return cost


def assumed_settlement(cost: int, reserved: Optional[int]) -> Settlement:
    """The settlement of a reservation whose response was lost."""
    released = max(0, (reserved or cost) - cost)
    return Settlement(settled=cost, released=released, over=0, confirmed=False)
