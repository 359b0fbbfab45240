"""requests: stay within another service's limit, for all processes together.

Each request takes a position in a queue on the server, and waits for its turn.
"""

from __future__ import annotations

import random
import time
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

import tidegate


class ThrottledAdapter(HTTPAdapter):
    """Sends each request at its turn. Raises `tidegate.Denied` if the turn is too far away."""

    def __init__(self, client: tidegate.Client, max_wait: float = 30.0, **options: Any) -> None:
        super().__init__(**options)
        self._client = client
        self._max_wait = max_wait

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:  # type: ignore[override]
        self._wait(urlsplit(request.url or "").hostname or "")
        return super().send(request, **options)

    def _wait(self, service: str) -> None:
        end = time.monotonic() + self._max_wait
        while True:
            verdict = self._client.check({"service": service})
            if verdict.allowed:
                time.sleep(verdict.delay)
                return
            # The queue is full.
            if verdict.retry_after is None or time.monotonic() + verdict.retry_after > end:
                raise tidegate.Denied(verdict)
            # The jitter spreads the retries of clients that were denied at the same time.
            time.sleep(verdict.retry_after + random.uniform(0, 0.1))


def throttled_session(client: tidegate.Client) -> requests.Session:
    session = requests.Session()
    session.mount("http://", ThrottledAdapter(client))
    session.mount("https://", ThrottledAdapter(client))
    return session


if __name__ == "__main__":
    with throttled_session(tidegate.Client()) as session:
        for _ in range(30):
            print(session.get("https://example.org/").status_code)
