"""Middleware for WSGI applications: Flask, Django, Bottle, Pyramid."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence
from urllib.parse import quote

from . import _middleware as shared
from ._client import Client
from ._middleware import ClientAddress, EntryReader, RequestHead
from ._verdict import Verdict
from .errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication

Environ = Dict[str, Any]


class WsgiMiddleware:
    """Checks each request before the application gets it. The arguments are those of
    `AsgiMiddleware`, with the WSGI environment instead of the scope.
    """

    def __init__(
        self,
        app: WSGIApplication,
        client: Client,
        *,
        entries: Sequence[str] = shared.DEFAULT_ENTRIES,
        extra: Optional[Callable[[Environ], Optional[Mapping[str, str]]]] = None,
        cost: Optional[Callable[[Environ], int]] = None,
        trusted_proxies: Sequence[str] = (),
        client_header: str = "x-forwarded-for",
    ) -> None:
        self.app = app
        self._client = client
        self._reader = EntryReader(entries, ClientAddress(trusted_proxies, client_header))
        self._extra = extra
        self._cost = cost

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            verdict = self._check(environ)
        except shared.Ambiguous as error:
            return _refuse(start_response, shared.malformed(str(error)))
        except InvalidRequest as error:
            if not (error.field or "").startswith("entries"):
                raise
            # The request contains an invalid entry, for example a path with `..`.
            return _refuse(start_response, shared.malformed(error.detail))
        except Unavailable:
            return _refuse(start_response, shared.unavailable())
        if verdict is None:
            return self.app(environ, start_response)
        if not verdict.allowed:
            return _refuse(start_response, shared.denial(verdict))
        if verdict.delay > 0:
            time.sleep(verdict.delay)
        return self.app(environ, _with_headers(start_response, verdict))

    def _check(self, environ: Environ) -> Optional[Verdict]:
        entries = self._reader.read(_head(environ))
        if self._extra is not None:
            extra = self._extra(environ)
            if extra is None:
                return None
            entries.update(extra)
        cost = 1 if self._cost is None else self._cost(environ)
        return self._client.check(entries, cost=cost)


def _head(environ: Environ) -> RequestHead:
    # WSGI decodes the path as latin-1.
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return RequestHead(
        method=environ["REQUEST_METHOD"],
        # The application routes by the decoded path. The server decodes a path once, so it sees
        # what the application sees.
        path=quote(path.encode("latin-1")) or "/",
        scheme=environ["wsgi.url_scheme"],
        query=environ.get("QUERY_STRING", ""),
        peer=environ.get("REMOTE_ADDR"),
        headers=_headers(environ),
    )


def _headers(environ: Environ) -> Sequence[Any]:
    headers = [
        (name[5:].replace("_", "-").lower(), value)
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers.append((name.replace("_", "-").lower(), environ[name]))
    return headers


def _with_headers(start_response: StartResponse, verdict: Verdict) -> StartResponse:
    def start(status: str, headers: List[Any], exc_info: Any = None) -> Any:
        headers = [*headers, *shared.copied_headers(verdict)]
        return start_response(status, headers, exc_info)

    return start


def _refuse(start_response: StartResponse, refusal: shared.Refusal) -> Iterable[bytes]:
    start_response(f"{refusal.status} {refusal.reason}", list(refusal.headers))
    return [refusal.body]
