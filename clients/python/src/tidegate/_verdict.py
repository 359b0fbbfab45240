"""Verdicts, and functions that parse them from responses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, TypeVar

from .errors import (
    Denied,
    InvalidRequest,
    NotOutstanding,
    TidegateError,
    Unauthorized,
    Unavailable,
    UnexpectedResponse,
)

T = TypeVar("T")

# The header fields of a verdict that a service can copy into its own response.
_COPIED_HEADERS = (
    "ratelimit",
    "ratelimit-policy",
    "retry-after",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
)

# The retry delay if the server is unreachable. The server reports the same delay while its store is
# unreachable.
_RETRY_AFTER_FAILURE = 1.0


@dataclass(frozen=True)
class LimitVerdict:
    """The verdict of one limit. All times are in seconds."""

    rule: Optional[str]
    policy: str
    allowed: bool
    over_limit: bool
    limit: int
    remaining: int
    reset_after: float
    retry_after: Optional[float]
    retry_after_estimated: bool
    delay: float
    shadow: bool


@dataclass(frozen=True)
class Verdict:
    """The decision about one request. It is true in a boolean context if the request is allowed.

    All times are in seconds, as for `time.sleep`. The fields have the same meaning as in the HTTP
    API:

    - `retry_after`: time until the same request would be allowed; 0 if it is, `None` for never.
    - `delay`: how long the caller must delay an allowed request; above 0 only for a queued limit.
    - `reason`: why the request is denied: `limit`, `blocked`, `store`, or `unreachable` if this
      client denied it because it could not reach the server; `None` if allowed.
    - `exactness`: `exact`, `local` or `none`. It is `none` if the server was not reached.
    - `headers`: the `RateLimit` and `Retry-After` fields, to copy into the service's own response.
    """

    allowed: bool
    rule: Optional[str] = None
    limit: Optional[int] = None
    remaining: Optional[int] = None
    reset_after: Optional[float] = None
    retry_after: Optional[float] = 0.0
    retry_after_estimated: bool = False
    delay: float = 0.0
    exactness: str = "exact"
    source: Optional[str] = None
    reason: Optional[str] = None
    limits: Tuple[LimitVerdict, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def is_undecided(self) -> bool:
        """True if the request is denied because the store or the server could not decide."""
        return self.reason in ("store", "unreachable")

    def raise_if_denied(self) -> None:
        """Raises `Denied` if the request is denied."""
        if not self.allowed:
            raise Denied(self)

    def describe(self) -> str:
        """Returns one line for logs. Do not show it to users: it contains the rule name."""
        if self.allowed:
            return "allowed"
        cause = {
            "blocked": "blocked",
            "store": "denied: the store could not decide",
            "unreachable": "denied: the server is unreachable",
        }.get(self.reason or "", "limit exceeded")
        rule = f" (rule {self.rule})" if self.rule is not None else ""
        wait = (
            "retrying will not succeed"
            if self.retry_after is None
            else f"retry in {self.retry_after:g} s"
        )
        return f"{cause}{rule}; {wait}"

    @classmethod
    def of_failure(cls, *, allowed: bool) -> Verdict:
        """Returns the client's own verdict if it could not reach the server."""
        return cls(
            allowed=allowed,
            retry_after=0.0 if allowed else _RETRY_AFTER_FAILURE,
            exactness="none",
            source="client",
            reason=None if allowed else "unreachable",
            headers={} if allowed else {"retry-after": "1"},
        )


@dataclass(frozen=True)
class Settlement:
    """The result of a settled reservation, in units.

    `confirmed` is false if the response of the attempt that settled the reservation was lost. The
    other fields are then assumptions: the final cost was settled, and it was at most the reserved
    cost.
    """

    settled: int
    released: int
    over: int
    confirmed: bool = True


@dataclass(frozen=True)
class Renewal:
    """The new token of a reservation, and the seconds until it expires."""

    token: str
    expires_in: float


@dataclass(frozen=True)
class Reserved:
    """The response of `/v1/reserve`: a verdict, and a token if the request is allowed."""

    verdict: Verdict
    renewal: Optional[Renewal]


@dataclass(frozen=True)
class Response:
    """A response, independent of the HTTP library."""

    status: int
    headers: Mapping[str, str]
    content: bytes


def read_verdict(response: Response) -> Verdict:
    return _verdict(_decision_members(response), response)


def read_reserved(response: Response) -> Reserved:
    members = _decision_members(response)
    verdict = _verdict(members, response)
    return Reserved(verdict, _renewal(members) if verdict.allowed else None)


def read_renewal(response: Response) -> Renewal:
    return _renewal(_ok_members(response))


def read_settlement(response: Response) -> Settlement:
    members = _ok_members(response)
    return Settlement(
        settled=members.required("settled", _whole),
        released=members.required("released", _whole),
        over=members.required("over", _whole),
    )


class _Members:
    """The fields of a JSON object. Errors name the invalid field."""

    def __init__(self, value: Any, place: str = "") -> None:
        if not isinstance(value, dict):
            raise UnexpectedResponse(f"{place or 'the body'}: expected a JSON object")
        self._value: Dict[str, Any] = value
        self._place = place

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def required(self, name: str, read: Callable[[Any], T]) -> T:
        try:
            return read(self._value[name])
        except KeyError:
            raise UnexpectedResponse(f"{self._place}{name}: is missing") from None
        except ValueError as error:
            raise UnexpectedResponse(f"{self._place}{name}: {error}") from None

    def optional(self, name: str, read: Callable[[Any], T]) -> Optional[T]:
        if self._value.get(name) is None:
            return None
        return self.required(name, read)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {_shown(value)}")
    return value


def _whole(value: Any) -> int:
    # In Python, `True` is an int.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number from 0, got {_shown(value)}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {_shown(value)}")
    return value


def _seconds(value: Any) -> float:
    return _whole(value) / 1000


def _list(value: Any) -> Tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {_shown(value)}")
    return tuple(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _decision_members(response: Response) -> _Members:
    """Returns the fields of a verdict, which has one of three statuses."""
    if response.status not in (200, 429, 503):
        raise _error(response)
    members = _json(response)
    if members is None or "allowed" not in members:
        raise _error(response)
    if members.required("allowed", _flag) != (response.status == 200):
        raise UnexpectedResponse(f"allowed: contradicts the status {response.status}")
    return members


def _ok_members(response: Response) -> _Members:
    members = _json(response) if response.status == 200 else None
    if members is None:
        raise _error(response)
    return members


def _json(response: Response) -> Optional[_Members]:
    try:
        value = json.loads(response.content)
    except (ValueError, RecursionError):
        return None
    return _Members(value) if isinstance(value, dict) else None


def _verdict(members: _Members, response: Response) -> Verdict:
    limits = members.required("limits", _list)
    return Verdict(
        allowed=members.required("allowed", _flag),
        rule=members.optional("rule", _text),
        limit=members.optional("limit", _whole),
        remaining=members.optional("remaining", _whole),
        reset_after=members.optional("reset_after_ms", _seconds),
        retry_after=_retry_after(members),
        retry_after_estimated=members.optional("retry_after_estimated", _flag) or False,
        delay=members.optional("delay_ms", _seconds) or 0.0,
        exactness=members.required("exactness", _text),
        source=members.optional("source", _text),
        reason=members.optional("reason", _text),
        limits=tuple(
            _limit_verdict(_Members(limit, f"limits[{at}].")) for at, limit in enumerate(limits)
        ),
        headers={
            name: response.headers[name] for name in _COPIED_HEADERS if name in response.headers
        },
    )


def _limit_verdict(members: _Members) -> LimitVerdict:
    return LimitVerdict(
        rule=members.optional("rule", _text),
        policy=members.required("policy", _text),
        allowed=members.required("allowed", _flag),
        over_limit=members.optional("over_limit", _flag) or False,
        limit=members.required("limit", _whole),
        remaining=members.required("remaining", _whole),
        reset_after=members.required("reset_after_ms", _seconds),
        retry_after=_retry_after(members),
        retry_after_estimated=members.optional("retry_after_estimated", _flag) or False,
        delay=members.optional("delay_ms", _seconds) or 0.0,
        shadow=members.optional("shadow", _flag) or False,
    )


def _retry_after(members: _Members) -> Optional[float]:
    # `null` means never, so an absent field must not be read as `null`.
    return members.required(
        "retry_after_ms", lambda value: None if value is None else _seconds(value)
    )


def _renewal(members: _Members) -> Renewal:
    return Renewal(
        token=members.required("reservation", _text),
        expires_in=members.required("expires_in_ms", _seconds),
    )


def _error(response: Response) -> TidegateError:
    """Returns the exception for a response that does not contain a result."""
    status = response.status
    problem = _problem(response)
    if status == 401:
        return Unauthorized("the server requires a token, or the token is wrong (401)")
    if status >= 500:
        detail = problem[0] if problem else f"the server answered {status}"
        return Unavailable(detail)
    if problem is None or status < 400:
        return UnexpectedResponse(f"unexpected response with status {status}: is this Tidegate?")
    detail, field_name, mistakes = problem
    if status == 404 and field_name == "reservation":
        return NotOutstanding(detail)
    return InvalidRequest(detail, status=status, field=field_name, mistakes=mistakes)


def _problem(response: Response) -> Optional[Tuple[str, Optional[str], Tuple[str, ...]]]:
    """Returns the detail, the field and the errors of a problem document, if the body is one."""
    members = _json(response)
    if members is None or "detail" not in members:
        return None
    try:
        mistakes = members.optional("mistakes", _list) or ()
        return (
            members.required("detail", _text),
            members.optional("field", _text),
            tuple(str(mistake) for mistake in mistakes),
        )
    except UnexpectedResponse:
        return None
