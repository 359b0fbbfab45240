"""The exceptions of this package.

A denial is not an exception: `Verdict.allowed` is false. An exception means that nothing was
decided, except `Denied`, which `Verdict.raise_if_denied` raises on request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Sequence

if TYPE_CHECKING:
    from ._verdict import Verdict

__all__ = [
    "Denied",
    "InvalidRequest",
    "NotOutstanding",
    "TidegateError",
    "Unauthorized",
    "Unavailable",
    "UnexpectedResponse",
]


class TidegateError(Exception):
    """The base of all exceptions of this package."""


class Denied(TidegateError):
    """A request was denied; raised by `Verdict.raise_if_denied` only."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.describe())
        self.verdict = verdict


class Unavailable(TidegateError):
    """The server is unreachable, did not answer in time, or could not answer.

    `on_failure` applies to this exception and to `UnexpectedResponse`.
    """


class UnexpectedResponse(Unavailable):
    """The response is not one of Tidegate. Another server possibly listens at this URL."""


class InvalidRequest(TidegateError):
    """The server rejected the request. `field` names the wrong field, if there is one."""

    def __init__(
        self,
        detail: str,
        *,
        status: int,
        field: Optional[str] = None,
        mistakes: Sequence[str] = (),
    ) -> None:
        super().__init__("; ".join(mistakes) or detail)
        self.detail = detail
        self.status = status
        self.field = field
        self.mistakes = tuple(mistakes)


class Unauthorized(TidegateError):
    """The token is missing or wrong."""


class NotOutstanding(TidegateError):
    """The reservation was settled before, or has expired."""
