"""A client for the rate limiter Tidegate, with middleware for ASGI and WSGI.

The `limits` storage is in `tidegate.limits`, because it needs the package `limits`.
"""

from __future__ import annotations

from ._async_client import AsyncClient, AsyncReservation
from ._client import Client, Reservation
from ._verdict import LimitVerdict, Renewal, Settlement, Verdict
from .asgi import AsgiMiddleware
from .errors import (
    Denied,
    InvalidRequest,
    NotOutstanding,
    TidegateError,
    Unauthorized,
    Unavailable,
    UnexpectedResponse,
)
from .wsgi import WsgiMiddleware

__all__ = [
    "AsgiMiddleware",
    "AsyncClient",
    "AsyncReservation",
    "Client",
    "Denied",
    "InvalidRequest",
    "LimitVerdict",
    "NotOutstanding",
    "Renewal",
    "Reservation",
    "Settlement",
    "TidegateError",
    "Unauthorized",
    "Unavailable",
    "UnexpectedResponse",
    "Verdict",
    "WsgiMiddleware",
]
