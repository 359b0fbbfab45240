"""The ASGI and WSGI middleware, over real HTTP servers, and its parts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

import httpx
import pytest
import uvicorn
from conftest import Server, StartServer

import tidegate
from tidegate import AsgiMiddleware, AsyncClient, Client, WsgiMiddleware
from tidegate._middleware import ClientAddress, EntryReader, RequestHead, parse_address

# Creates the middleware with these arguments, and returns the application's URL.
Serve = Callable[..., str]


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


def wsgi_app(environ: Dict[str, Any], start_response: Any) -> List[bytes]:
    start_response("200 OK", [("content-type", "text/plain")])
    return [b"served"]


@contextlib.contextmanager
def serve_asgi(app: Any) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", proxy_headers=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


class QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serve_wsgi(app: Any) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, app, handler_class=QuietHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["asgi", "wsgi"])
def serve(request: pytest.FixtureRequest, server: Server) -> Iterator[Serve]:
    """Serves an application behind each of the two kinds of middleware."""
    with contextlib.ExitStack() as stack:

        def start(url: str = server.url, on_failure: str = "raise", **arguments: Any) -> str:
            if request.param == "asgi":
                client = AsyncClient(url, on_failure=on_failure)
                middleware = AsgiMiddleware(asgi_app, client, **arguments)
                return stack.enter_context(serve_asgi(middleware))
            sync_client = Client(url, on_failure=on_failure)
            wsgi = WsgiMiddleware(wsgi_app, sync_client, **arguments)
            return stack.enter_context(serve_wsgi(wsgi))

        yield start


def get(url: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.get(url, headers=named, trust_env=False, verify=False)


def customer(name: str) -> Callable[[Any], Dict[str, str]]:
    return lambda _: {"customer": name}



def test_a_denial_is_a_problem_document(serve: Serve, unique: str) -> None:
    url = serve(trusted_proxies=["127.0.0.1"])
    address = f"2001:db8:{time.time_ns() & 0xFFFF:x}:{time.time_ns() >> 16 & 0xFFFF:x}::1"
    served = [get(f"{url}/limited", x_forwarded_for=address) for _ in range(3)]
    assert [response.text for response in served] == ["served"] * 3
    assert served[0].headers["ratelimit"].startswith('"3/min";r=2')
    assert served[0].headers["ratelimit-policy"] == '"3/min";q=3;w=60'

    denied = get(f"{url}/limited", x_forwarded_for=address)
    assert denied.status_code == 429
    assert denied.headers["content-type"] == "application/problem+json"
    assert 55 <= int(denied.headers["retry-after"]) <= 60
    assert denied.headers["ratelimit"].startswith('"3/min";r=0')
    problem = denied.json()
    assert problem["type"].endswith("#quota-exceeded")
    assert (problem["title"], problem["status"]) == ("Too Many Requests", 429)
    assert problem["violated-policies"] == ["3/min"]
    assert problem["detail"].startswith("3/min exceeded; retry in ")
    assert 55_000 < problem["retry_after_ms"] <= 60_000
    assert "per-ip" not in denied.text
    # A different spelling of the same path.
    assert get(f"{url}//%6cimited", x_forwarded_for=address).status_code == 429
    assert get(f"{url}/free", x_forwarded_for=address).status_code == 200


def test_a_request_that_can_never_pass(serve: Serve, unique: str) -> None:
    url = serve(extra=customer(unique), cost=lambda _: 101)
    denied = get(url)
    assert denied.status_code == 429 and "retry-after" not in denied.headers
    assert denied.json()["retry_after_ms"] is None
    assert "retrying will not succeed" in denied.json()["detail"]


def test_extra_entries_and_cost(serve: Serve, unique: str, server: Server) -> None:
    url = serve(extra=customer(unique), cost=lambda _: 60)
    assert [get(url).status_code for _ in range(2)] == [200, 429]
    # A request for which `extra` returns nothing is not checked.
    unchecked = serve(extra=lambda _: None)
    response = get(unchecked)
    assert response.status_code == 200 and "ratelimit" not in response.headers


def test_a_forged_header_is_not_trusted_by_default(start_server: StartServer, serve: Serve) -> None:
    url = serve(start_server().url)
    statuses = [
        get(f"{url}/limited", x_forwarded_for=f"203.0.113.{number}").status_code
        for number in range(4)
    ]
    assert statuses == [200, 200, 200, 429]


def test_headers_queries_and_cookies(serve: Serve, unique: str) -> None:
    key = f"k{time.time_ns()}"
    url = serve(entries=["header.X-Api-Key", "query.user", "cookie.session"])
    requests: List[Tuple[str, Dict[str, str]]] = [
        (url, {"x-api-key": key}),
        (f"{url}?user={key}", {}),
        (url, {"cookie": f'a=b; session="{key}"'}),
    ]
    for address, headers in requests:
        assert [get(address, **headers).status_code for _ in range(3)] == [200, 200, 429]
    for ambiguous in (
        get(f"{url}?user=1&user=2"),
        get(url, cookie="session=1; session=2"),
    ):
        assert ambiguous.status_code == 400
        assert "occurs several times" in ambiguous.json()["detail"]


def test_a_path_that_rules_cannot_match_is_refused(serve: Serve) -> None:
    url = serve()
    # Clients resolve `..`, so the request is written by hand.
    host, port = url[len("http://") :].split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /a/%2e%2e/limited HTTP/1.0\r\nHost: a\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert b" 400 " in answer.splitlines()[0] and b"application/problem+json" in answer


def test_a_queue_delays(serve: Serve, start_server: StartServer) -> None:
    url = serve(start_server().url)
    begin = time.monotonic()
    with httpx.Client(trust_env=False, verify=False) as client:
        assert client.get(f"{url}/queue").status_code == 200
        assert client.get(f"{url}/queue").status_code == 200
    assert time.monotonic() - begin >= 0.09


@pytest.mark.parametrize("on_failure, status", [("raise", 503), ("closed", 503), ("open", 200)])
def test_a_killed_server(
    serve: Serve, start_server: StartServer, on_failure: str, status: int
) -> None:
    server = start_server()
    url = serve(server.url, on_failure=on_failure)
    assert get(url).status_code == 200
    server.kill()
    response = get(url)
    assert response.status_code == status
    if status == 503:
        assert response.headers["retry-after"] == "1"
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["type"].endswith("#temporary-reduced-capacity")
        assert "could not decide" in response.json()["detail"]
    server.start()
    assert get(url).status_code == 200


def test_exactly_the_limit_passes(serve: Serve, unique: str) -> None:
    url = serve(extra=customer(unique))
    statuses: List[int] = []

    def send() -> None:
        with httpx.Client(trust_env=False, verify=False, timeout=30) as client:
            statuses.extend(client.get(url).status_code for _ in range(20))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (statuses.count(200), statuses.count(429)) == (100, 20)


class TestWebSockets:
    """Runs without a server: events are simple, and a client would be another dependency."""

    def handshake(self, server: Server, unique: str, **scope: Any) -> List[Dict[str, Any]]:
        sent: List[Dict[str, Any]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "websocket.accept"})

        async def receive() -> Dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        async def shake() -> None:
            async with AsyncClient(server.url) as client:
                middleware = AsgiMiddleware(
                    app, client, extra=customer(unique), cost=lambda _: 60
                )
                whole = {"type": "websocket", "path": "/", "headers": [], "client": None, **scope}
                await middleware(whole, receive, send)
                await middleware(whole, receive, send)

        asyncio.run(shake())
        return sent

    def test_a_denial_with_the_extension(self, server: Server, unique: str) -> None:
        extensions: Dict[str, Any] = {"websocket.http.response": {}}
        accept, start, body = self.handshake(server, unique, extensions=extensions)
        assert accept["type"] == "websocket.accept"
        assert any(name == b"ratelimit" for name, _ in accept["headers"])
        assert (start["type"], start["status"]) == ("websocket.http.response.start", 429)
        assert b"100/h exceeded" in body["body"]

    def test_a_denial_without_it(self, server: Server, unique: str) -> None:
        accept, close = self.handshake(server, unique)
        assert close == {"type": "websocket.close", "code": 1008, "reason": "Too Many Requests"}


def test_other_events_pass_unchecked(server: Server) -> None:
    seen: List[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    middleware = AsgiMiddleware(app, AsyncClient("http://127.0.0.1:1"))
    asyncio.run(middleware({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


def test_extra_can_be_async(server: Server, unique: str) -> None:
    async def extra(_: Any) -> Dict[str, str]:
        return {"customer": unique}

    async def wrong(_: Any) -> Any:
        return ["customer"]

    async def call(function: Any) -> Tuple[int, int]:
        sent: List[Dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope: Dict[str, Any] = {"type": "http", "method": "GET", "path": "/"}
        scope.update(headers=[], client=None)
        async with AsyncClient(server.url) as client:
            middleware = AsgiMiddleware(asgi_app, client, extra=function, cost=lambda _: 60)
            await middleware(dict(scope), None, send)  # type: ignore[arg-type]
            await middleware(dict(scope), None, send)  # type: ignore[arg-type]
        statuses = [event["status"] for event in sent if event["type"] == "http.response.start"]
        return statuses[0], statuses[1]

    assert asyncio.run(call(extra)) == (200, 429)
    with pytest.raises(TypeError, match="extra: expected a mapping or None, got list"):
        asyncio.run(call(wrong))


def test_a_wrong_cost_is_an_error_of_the_application(server: Server) -> None:
    middleware = WsgiMiddleware(wsgi_app, Client(server.url), cost=lambda _: 0)
    environ = {"REQUEST_METHOD": "GET", "wsgi.url_scheme": "http", "REMOTE_ADDR": "192.0.2.1"}
    with pytest.raises(tidegate.InvalidRequest, match="cost"):
        middleware(environ, lambda *_: None)  # type: ignore[arg-type]


def head(peer: Any, *forwarded: str) -> RequestHead:
    headers = [("x-forwarded-for", value) for value in forwarded]
    return RequestHead("GET", "/", "http", "", peer, headers)


@pytest.mark.parametrize(
    "proxies, peer, forwarded, expected",
    [
        ([], "192.0.2.1", ["198.51.100.1"], "192.0.2.1"),
        ([], "::ffff:192.0.2.1", [], "192.0.2.1"),
        ([], "2001:db8::1%eth0", [], "2001:db8::1"),
        (["10.0.0.0/8"], "10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        (["10.0.0.0/8"], "192.0.2.1", ["198.51.100.1"], "192.0.2.1"),
        # The client wrote the first address itself.
        (["10.0.0.0/8"], "10.0.0.1", ["203.0.113.9, 198.51.100.1"], "198.51.100.1"),
        (["10.0.0.0/8"], "10.0.0.1", ["203.0.113.9", "198.51.100.1"], "198.51.100.1"),
        (["10.0.0.0/8"], "10.0.0.1", ["198.51.100.1, 10.0.0.2"], "198.51.100.1"),
        (["10.0.0.0/8"], "10.0.0.1", ["198.51.100.1:4711, 10.0.0.2:80"], "198.51.100.1"),
        (["10.0.0.0/8"], "10.0.0.1", ["[2001:db8::1]:4711"], "2001:db8::1"),
        (["10.0.0.0/8"], "10.0.0.1", ["::ffff:198.51.100.1"], "198.51.100.1"),
        # If an address is invalid or missing, the address of the proxy that sent it is used.
        (["10.0.0.0/8"], "10.0.0.1", ["198.51.100.1, unknown, 10.0.0.2"], "10.0.0.2"),
        (["10.0.0.0/8"], "10.0.0.1", [], "10.0.0.1"),
        (["10.0.0.0/8"], "10.0.0.1", ["10.0.0.3"], "10.0.0.3"),
        (["fd00::/8"], "fd00::1", ["198.51.100.1"], "198.51.100.1"),
        # A peer on a Unix socket does not have an address.
        ([], None, ["198.51.100.1"], "127.0.0.1"),
        ([], "", ["198.51.100.1"], "127.0.0.1"),
        (["unix"], None, ["198.51.100.1"], "198.51.100.1"),
    ],
)
def test_the_address_of_the_client(
    proxies: List[str], peer: Any, forwarded: List[str], expected: str
) -> None:
    assert ClientAddress(proxies, "X-Forwarded-For").of(head(peer, *forwarded)) == expected


def test_wrong_settings_name_the_setting() -> None:
    with pytest.raises(ValueError, match="trusted_proxies: expected networks"):
        ClientAddress(["10.0.0.1/8"], "x-forwarded-for")
    with pytest.raises(ValueError, match="client_header: the header Forwarded"):
        ClientAddress(["10.0.0.0/8"], "Forwarded")
    with pytest.raises(ValueError, match="entries: unknown entry 'pth'; expected method, path"):
        EntryReader(["pth"], ClientAddress([], "x-forwarded-for"))


def test_an_address_without_digits_is_none() -> None:
    assert parse_address("unix") is None
    assert parse_address("") is None
