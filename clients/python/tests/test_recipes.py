"""Runs each recipe with the real framework against a real server with the recipes' rules."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Iterator, List

import httpx
import pytest
import requests
from conftest import REPOSITORY, Server, StartServer
from test_middleware import serve_asgi, serve_wsgi

import tidegate

RECIPES = REPOSITORY / "recipes" / "python"


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Server:
    rules = (RECIPES / "rules.yaml").read_text()
    # Each test server has its own port.
    listen, _, rest = rules.partition("\n")
    assert listen.startswith("listen:")
    return start_server(rest)


@pytest.fixture
def recipe(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a recipe, which reads its settings from the environment."""
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setenv("TIDEGATE_URL", server.url)
    monkeypatch.setenv("TIDEGATE_STORAGE", f"tidegate://{server.host}")
    imported: List[str] = []

    def load(name: str) -> Any:
        imported.append(name)
        return importlib.import_module(name)

    yield load
    for name in imported:
        sys.modules.pop(name, None)


class Service:
    """A service that records the times of its requests, and responds with a model's usage."""

    def __init__(self) -> None:
        self.times: List[float] = []
        self.status = 200
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.times.append(time.monotonic())
                body = json.dumps({"usage": {"total_tokens": 321}}).encode()
                self.send_response(service.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


def _send_throttled(tidegate_url: str, service_url: str, count: int) -> int:
    sys.path.insert(0, str(RECIPES))
    from requests_throttle import throttled_session

    with throttled_session(tidegate.Client(tidegate_url, timeout=30)) as session:
        return sum(session.get(service_url).status_code == 200 for _ in range(count))


def test_requests_throttle(server: Server, service: Service) -> None:
    arguments = (server.url, service.url, 10)
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        sent = processes.starmap(_send_throttled, [arguments, arguments])
    assert sent == [10, 10]
    # 20 requests from two processes, at 10 per second, take at least 1.9 s.
    assert len(service.times) == 20
    assert service.times[-1] - service.times[0] >= 1.8


def test_requests_throttle_gives_up(recipe: Any) -> None:
    class Full(tidegate.Client):
        """A client for a server whose queue is full."""

        def check(self, *_: Any, **__: Any) -> tidegate.Verdict:
            return tidegate.Verdict(allowed=False, reason="limit", retry_after=31.0)

    session = recipe("requests_throttle").throttled_session(Full())
    with pytest.raises(tidegate.Denied, match="retry in 31 s"):
        session.get("http://127.0.0.1:1/")


def test_requests_tokens(server: Server, service: Service, recipe: Any) -> None:
    complete = recipe("requests_tokens").complete
    client = tidegate.Client(server.url)

    def remaining() -> Any:
        return client.peek({"model": "small"}).remaining

    assert complete(client, service.url, "small", "Hello", 4000)["usage"]["total_tokens"] == 321
    assert remaining() == 10_000 - 321 - 1
    service.status = 500
    with pytest.raises(requests.HTTPError):
        complete(client, service.url, "small", "Hello", 4000)
    assert remaining() == 10_000 - 321 - 1
    with pytest.raises(tidegate.Denied):
        complete(client, service.url, "small", "Hello", 9_900)


def test_fastapi(server: Server, recipe: Any) -> None:
    with serve_asgi(recipe("fastapi_app").app) as url:
        with httpx.Client(base_url=url, trust_env=False, verify=False) as browser:
            statuses = [browser.get("/api/orders").status_code for _ in range(21)]
            assert (statuses.count(200), statuses[-1]) == (20, 429)
            denied = browser.get("/api/orders")
            assert denied.headers["content-type"] == "application/problem+json"
            assert int(denied.headers["retry-after"]) <= 60

            def log_in(password: str) -> int:
                body: Dict[str, str] = {"account": "ann", "password": password}
                status: int = browser.post("/login", json=body, timeout=30).status_code
                return status

            assert [log_in("correct horse") for _ in range(10)] == [200] * 10
            with ThreadPoolExecutor(10) as threads:
                statuses = list(threads.map(log_in, ["guess"] * 60))
            assert (statuses.count(401), statuses.count(429)) == (5, 55)
            assert log_in("correct horse") == 429


def test_flask(
    start_server: StartServer, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use a separate server, because the clients are the same as in the FastAPI recipe.
    own = start_server((RECIPES / "rules.yaml").read_text().partition("\n")[2])
    monkeypatch.setenv("TIDEGATE_URL", own.url)
    with serve_wsgi(recipe("flask_app").app) as url:
        with httpx.Client(base_url=url, trust_env=False, verify=False) as browser:
            statuses = [browser.get("/api/orders").status_code for _ in range(21)]
            assert (statuses.count(200), statuses[-1]) == (20, 429)
            own.kill()
            assert browser.get("/api/orders").status_code == 200
            own.start()


@pytest.mark.parametrize(
    "name, serve", [("flask_limiter_app", serve_wsgi), ("slowapi_app", serve_asgi)]
)
def test_limits_in_the_code(recipe: Any, name: str, serve: Any) -> None:
    with serve(recipe(name).app) as url, httpx.Client(trust_env=False, verify=False) as browser:
        responses = [browser.get(f"{url}/reports") for _ in range(4)]
    assert [response.status_code for response in responses] == [200, 200, 200, 429]
    if name == "flask_limiter_app":
        assert responses[0].headers["x-ratelimit-remaining"] == "2"
        assert 55 <= int(responses[3].headers["retry-after"]) <= 61
