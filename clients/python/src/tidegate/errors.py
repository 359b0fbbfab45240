"""The exceptions of this package.

A denial is not an exception: `Verdict.allowed` is false. An exception means that there is no
decision. The only exception to this is `Denied`, which `Verdict.raise_if_denied` raises.
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
    """The base class of this package's exceptions."""


class Denied(TidegateError):
    """A request was denied. Raised only by `Verdict.raise_if_denied`."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.describe())
        self.verdict = verdict


class Unavailable(TidegateError):
    """The server is unreachable, did not respond in time, or could not respond.

    `on_failure` applies to this exception and to `UnexpectedResponse`.
    """


class UnexpectedResponse(Unavailable):
    """The response is not from Tidegate. Another server may be listening at this URL."""


class InvalidRequest(TidegateError):
    """The server rejected the request. `field` is the invalid field, if there is one."""

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
    """The reservation was already settled, or has expired."""
