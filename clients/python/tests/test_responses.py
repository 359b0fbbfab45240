"""Malformed and unexpected responses, from a server with scripted responses."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Iterator, List, Tuple

import pytest

import tidegate
from tidegate import AsyncClient, Client

VERDICT: Dict[str, Any] = {
    "allowed": True,
    "rule": "r",
    "limit": 5,
    "remaining": 4,
    "reset_after_ms": 1500,
    "retry_after_ms": 0,
    "delay_ms": 0,
    "exactness": "exact",
    "limits": [],
}

Answer = Tuple[int, Dict[str, str], bytes]


class Scripted:
    """A server that sends the responses in a list in order, and then repeats the last one."""

    def __init__(self) -> None:
        self.answers: List[Answer] = []
        self.requests: List[Dict[str, Any]] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                scripted.requests.append({"path": self.path, "body": json.loads(body)})
                answers = scripted.answers
                status, headers, content = answers.pop(0) if len(answers) > 1 else answers[0]
                if status == 0:
                    # Close the connection without a response.
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in {"content-length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def says(self, *answers: Tuple[int, Any]) -> None:
        self.answers = [
            (status, {}, body if isinstance(body, bytes) else json.dumps(body).encode())
            for status, body in answers
        ]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


def changed(**members: Any) -> Dict[str, Any]:
    return {**VERDICT, **members}


def without(name: str) -> Dict[str, Any]:
    return {given: value for given, value in VERDICT.items() if given != name}


@pytest.mark.parametrize(
    "status, body, message",
    [
        (200, b"", "is this Tidegate"),
        (200, b"<html>It works!</html>", "is this Tidegate"),
        (200, b"[" * 100_000, "is this Tidegate"),
        (200, b'{"allowed": true', "is this Tidegate"),
        (200, b"\xff\xfe", "is this Tidegate"),
        (200, [], "is this Tidegate"),
        (200, {}, "is this Tidegate"),
        (200, changed(allowed="true"), "allowed: expected true or false, got \"true\""),
        (200, changed(allowed=1), "allowed: expected true or false, got 1"),
        (200, changed(allowed=False), "allowed: contradicts the status 200"),
        (429, VERDICT, "allowed: contradicts the status 429"),
        (503, VERDICT, "allowed: contradicts the status 503"),
        (429, b"Too Many Requests", "unexpected response with status 429"),
        (200, changed(rule=7), "rule: expected a string, got 7"),
        (200, changed(remaining=-1), "remaining: expected a whole number from 0, got -1"),
        (200, changed(limit=True), "limit: expected a whole number from 0, got true"),
        (200, changed(limit=1.5), "limit: expected a whole number from 0"),
        (200, changed(reset_after_ms="9"), "reset_after_ms: expected a whole number"),
        (200, without("retry_after_ms"), "retry_after_ms: is missing"),
        (200, without("exactness"), "exactness: is missing"),
        (200, without("limits"), "limits: is missing"),
        (200, changed(limits={}), "limits: expected a list"),
        (200, changed(limits=[3]), r"limits\[0\]\.: expected a JSON object"),
        (200, changed(limits=[{"policy": "1/s"}]), r"limits\[0\]\.allowed: is missing"),
        (302, b"", "unexpected response with status 302"),
        (404, b"<html>nginx</html>", "unexpected response with status 404"),
        (403, VERDICT, "unexpected response with status 403"),
    ],
)
def test_a_malformed_answer_is_no_decision(
    scripted: Scripted, status: int, body: Any, message: str
) -> None:
    scripted.says((status, body))
    with pytest.raises(tidegate.UnexpectedResponse, match=message):
        Client(scripted.url).check({})
    assert Client(scripted.url, on_failure="open").check({}).source == "client"
    assert not Client(scripted.url, on_failure="closed").check({}).allowed


def test_a_valid_answer_with_unknown_members(scripted: Scripted) -> None:
    scripted.says((200, changed(new_member={"a": 1})))
    verdict = Client(scripted.url).check({})
    assert verdict.allowed and verdict.reset_after == 1.5


def test_null_means_never(scripted: Scripted) -> None:
    scripted.says((429, changed(allowed=False, reason="limit", retry_after_ms=None)))
    assert Client(scripted.url).check({}).retry_after is None


def test_a_denial_of_the_store_is_a_verdict(scripted: Scripted) -> None:
    denial = changed(allowed=False, reason="store", rule=None, limit=None, remaining=None)
    scripted.says((503, {**denial, "reset_after_ms": None, "retry_after_ms": 1000}))
    # The server has decided by its own policy, which `on_failure` does not override.
    verdict = Client(scripted.url, on_failure="open").check({})
    assert not verdict.allowed and verdict.is_undecided and verdict.retry_after == 1.0


def test_503_without_a_verdict(scripted: Scripted) -> None:
    problem = {"title": "Service Unavailable", "status": 503, "detail": "too many reservations"}
    scripted.says((503, problem))
    with pytest.raises(tidegate.Unavailable, match="too many reservations"):
        Client(scripted.url).reserve({})
    with pytest.raises(tidegate.Unavailable):
        Client(scripted.url).check({})


def test_a_reservation_without_a_token(scripted: Scripted) -> None:
    scripted.says((200, VERDICT))
    with pytest.raises(tidegate.UnexpectedResponse, match="reservation: is missing"):
        Client(scripted.url).reserve({})


SETTLED = {"settled": 3, "released": 7, "over": 0}
GONE = {"title": "Not Found", "status": 404, "detail": "settled before", "field": "reservation"}
BUSY = {"title": "Service Unavailable", "status": 503, "detail": "Redis did not answer"}


class TestSettling:
    def test_it_is_repeated_after_503(self, scripted: Scripted) -> None:
        scripted.says((503, BUSY), (200, SETTLED))
        assert Client(scripted.url).settle("t", 3) == tidegate.Settlement(3, 7, 0)
        assert [request["path"] for request in scripted.requests] == ["/v1/settle"] * 2

    def test_it_is_repeated_after_a_lost_connection(self, scripted: Scripted) -> None:
        scripted.says((0, b""), (200, SETTLED))
        assert Client(scripted.url).settle("t", 3).settled == 3

    def test_a_lost_answer_is_not_an_error(self, scripted: Scripted) -> None:
        """The first attempt settles, but its response is lost. The second one finds no
        reservation."""
        scripted.says((0, b""), (404, GONE))
        settlement = Client(scripted.url).settle("t", 3)
        assert settlement == tidegate.Settlement(3, 0, 0, confirmed=False)

    def test_a_reservation_that_is_gone_at_once_is_an_error(self, scripted: Scripted) -> None:
        scripted.says((404, GONE))
        with pytest.raises(tidegate.NotOutstanding):
            Client(scripted.url).settle("t", 3)
        assert len(scripted.requests) == 1

    def test_attempts_are_bounded(self, scripted: Scripted) -> None:
        scripted.says((503, BUSY))
        with pytest.raises(tidegate.Unavailable, match="Redis did not answer"):
            Client(scripted.url).settle("t", 3)
        assert len(scripted.requests) == 3

    @pytest.mark.anyio
    async def test_the_async_client_repeats_it(self, scripted: Scripted) -> None:
        async with AsyncClient(scripted.url) as client:
            scripted.says((503, BUSY), (0, b""), (404, GONE))
            assert not (await client.settle("t", 3)).confirmed
            scripted.says((503, BUSY))
            with pytest.raises(tidegate.Unavailable):
                await client.settle("t", 3)


def test_a_decision_is_never_repeated(scripted: Scripted) -> None:
    """A request whose response was lost may have been charged, so it is not sent again."""
    scripted.says((0, b""), (200, VERDICT))
    with pytest.raises(tidegate.Unavailable):
        Client(scripted.url).check({})
    assert len(scripted.requests) == 1


@pytest.mark.anyio
async def test_the_async_client_reads_the_same(scripted: Scripted) -> None:
    async with AsyncClient(scripted.url, on_failure="closed") as client:
        scripted.says((200, b"<html>"))
        assert (await client.check({})).reason == "unreachable"
        scripted.says((401, b""))
        with pytest.raises(tidegate.Unauthorized):
            await client.check({})
