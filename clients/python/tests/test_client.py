"""The synchronous and the asynchronous client against a real server."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Set

import anyio
import pytest
from conftest import Server, StartServer, reserve_port

import tidegate
from tidegate import AsyncClient, Client


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url)


def test_check_charges_and_denies(client: Client, unique: str) -> None:
    entries = {"path": "/limited", "ip": "192.0.2.1"}
    remaining = [client.check(entries).remaining for _ in range(3)]
    assert remaining == [2, 1, 0]

    denied = client.check(entries)
    assert not denied and not denied.allowed
    assert (denied.rule, denied.limit, denied.reason) == ("per-ip", 3, "limit")
    assert denied.retry_after is not None and 55 < denied.retry_after <= 60
    assert denied.exactness == "exact" and not denied.is_undecided
    assert denied.limits[0].policy == "3/min" and not denied.limits[0].allowed
    assert denied.headers["retry-after"] == "60"
    assert denied.headers["ratelimit"].startswith('"3/min";r=0;t=')
    with pytest.raises(tidegate.Denied, match=r"limit exceeded \(rule per-ip\); retry in"):
        denied.raise_if_denied()


def test_peek_charges_nothing(client: Client, unique: str) -> None:
    entries = {"customer": unique}
    assert client.peek(entries, cost=100).remaining == 0
    assert client.check(entries, cost=100).allowed
    never = client.peek(entries, cost=101)
    assert not never.allowed and never.retry_after is None


def test_a_request_waits_for_a_slot(server: Server, unique: str) -> None:
    client = Client(server.url, timeout=0.3)
    entries = {"path": "/report", "customer": unique}
    first = client.reserve(entries)
    assert first.allowed
    assert not client.check(entries), "without `wait`, the request is denied at once"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.reserve, entries, wait=10)
        # Longer than the timeout, which the wait extends.
        time.sleep(0.6)
        assert not waiting.done()
        first.settle(0)
        second = waiting.result(timeout=10)
    assert second.allowed
    with pytest.raises(tidegate.InvalidRequest, match="wait_ms"):
        client.check(entries, wait=61)
    for wait in (-1, float("inf"), "1s"):
        with pytest.raises(ValueError, match="wait: expected seconds"):
            client.check(entries, wait=wait)  # type: ignore[arg-type]
    second.cancel()


@pytest.mark.anyio
async def test_an_async_request_waits_for_a_slot(server: Server, unique: str) -> None:
    async with AsyncClient(server.url, timeout=0.3) as client:
        entries = {"path": "/report", "customer": unique}
        first = await client.reserve(entries)

        async def settle_later() -> None:
            await asyncio.sleep(0.6)
            await first.settle(0)

        settling = asyncio.ensure_future(settle_later())
        assert (await client.check(entries, wait=10)).allowed
        await settling


def test_a_request_without_a_rule_is_allowed(client: Client) -> None:
    verdict = client.check({"path": "/free"})
    assert verdict.allowed and verdict.rule is None and verdict.limit is None
    assert verdict.limits == ()


def test_throttle_takes_each_form_of_a_limit(client: Client, unique: str) -> None:
    gcra = {"algorithm": "gcra", "rate": "100/s", "burst": 5}
    assert client.throttle(unique, gcra).limit == 6
    assert client.throttle(f"{unique}-2", "20/min", cost=20).remaining == 0
    several = client.throttle(f"{unique}-3", ["5/s", "20/min"])
    assert [limit.policy for limit in several.limits] == ["5/s", "20/min"]
    assert client.throttle(f"{unique}-4", "1/min", peek=True).allowed
    assert client.throttle(f"{unique}-4", "1/min").allowed
    assert not client.throttle(f"{unique}-4", "1/min").allowed


def test_wrong_requests_name_the_field(client: Client) -> None:
    with pytest.raises(tidegate.InvalidRequest) as caught:
        client.check({"ip": "example.org", "path": "/limited"})
    assert (caught.value.field, caught.value.status) == ("entries.ip", 400)
    with pytest.raises(tidegate.InvalidRequest, match="a slash separates"):
        client.throttle("k", "5 per minute")
    with pytest.raises(tidegate.InvalidRequest, match="cost"):
        client.check({}, cost=0)
    with pytest.raises(TypeError, match=r"entries\['customer'\]: expected a string, got int"):
        client.check({"customer": 7})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="cost: expected a whole number"):
        client.check({}, cost=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_failure: expected one of"):
        Client(on_failure="maybe")
    with pytest.raises(ValueError, match="url: expected http"):
        Client("127.0.0.1:8080")


class TestReservations:
    def test_the_end_of_with_settles(self, client: Client, unique: str) -> None:
        entries = {"model": unique}
        with client.reserve(entries, cost=600, ttl=30) as reservation:
            assert reservation and reservation.allowed
            assert reservation.expires_in == 30.0
            assert not client.reserve(entries, cost=600).allowed
            reservation.cost = 100
        assert reservation.token is None
        assert client.peek(entries).remaining == 899

    def test_without_a_final_cost_the_estimate_stays(self, client: Client, unique: str) -> None:
        with client.reserve({"model": unique}, cost=600):
            pass
        assert client.peek({"model": unique}).remaining == 399

    @pytest.mark.parametrize(
        "on_error, remaining", [("cancel", 999), ("settle", 989), ("keep", 399)]
    )
    def test_an_exception_of_the_body(
        self, client: Client, unique: str, on_error: str, remaining: int
    ) -> None:
        with pytest.raises(ZeroDivisionError):
            with client.reserve({"model": unique}, cost=600, on_error=on_error) as reservation:
                reservation.cost = 10
                raise ZeroDivisionError
        assert client.peek({"model": unique}).remaining == remaining

    def test_a_denied_reservation_has_nothing_to_settle(
        self, client: Client, unique: str
    ) -> None:
        with client.reserve({"model": unique}, cost=1001) as reservation:
            assert not reservation
            assert reservation.token is None
            with pytest.raises(tidegate.Denied):
                reservation.raise_if_denied()
        assert reservation.settle(5) is None
        assert client.peek({"model": unique}).remaining == 999

    def test_a_reservation_is_settled_once(self, client: Client, unique: str) -> None:
        reservation = client.reserve({"model": unique}, cost=600)
        token = reservation.token
        assert token is not None
        assert reservation.settle(700) == tidegate.Settlement(settled=700, released=0, over=100)
        assert reservation.settle(1) is None
        with pytest.raises(tidegate.NotOutstanding):
            client.settle(token, 1)
        assert client.peek({"model": unique}).remaining == 299

    def test_cancel_and_renew(self, client: Client, unique: str) -> None:
        reservation = client.reserve({"model": unique}, cost=600, ttl=timedelta(seconds=5))
        old = reservation.token
        reservation.renew("20s")
        assert reservation.token not in (None, old)
        assert reservation.expires_in == 20.0
        assert reservation.cancel() == tidegate.Settlement(settled=0, released=600, over=0)
        assert client.peek({"model": unique}).remaining == 999

    def test_an_expired_reservation_raises_at_the_end(self, client: Client, unique: str) -> None:
        with pytest.raises(tidegate.NotOutstanding):
            with client.reserve({"model": unique}, cost=600, ttl=0.001):
                time.sleep(0.5)

    def test_a_forged_token_is_an_error(self, client: Client) -> None:
        with pytest.raises(tidegate.InvalidRequest) as caught:
            client.settle("forged", 1)
        assert caught.value.field == "reservation"

    def test_failures_only(self, client: Client, unique: str) -> None:
        """Exactly five of 60 parallel wrong passwords reach the password check."""
        entries = {"path": "/login", "account": unique}

        def log_in(password: str) -> bool:
            with client.reserve(entries, ttl=10) as reservation:
                if not reservation:
                    return False
                if password == "right":
                    reservation.cost = 0
                return True

        assert all(log_in("right") for _ in range(20))
        with ThreadPoolExecutor(20) as threads:
            assert sum(threads.map(log_in, ["wrong"] * 60)) == 5


class TestAsync:
    @pytest.mark.anyio
    async def test_each_call(self, server: Server, unique: str) -> None:
        async with AsyncClient(server.url) as client:
            assert await client.is_healthy()
            assert (await client.check({"customer": unique}, cost=99)).remaining == 1
            assert not await client.peek({"customer": unique}, cost=2)
            assert (await client.throttle(unique, "2/min")).remaining == 1

            async with client.reserve({"model": unique}, cost=600) as reservation:
                await reservation.renew(20)
                reservation.cost = 100
            assert (await client.peek({"model": unique})).remaining == 899

            reservation = await client.reserve({"model": unique}, cost=600)
            settlement = await reservation.settle(1)
            assert settlement == tidegate.Settlement(settled=1, released=599, over=0)
            renewed = await client.reserve({"model": unique}, cost=5)
            assert renewed.token is not None
            renewal = await client.renew(renewed.token, 30)
            assert renewal.expires_in == 30.0
            assert (await client.settle(renewal.token, 0)).released == 5

    @pytest.mark.anyio
    async def test_a_cancelled_task_refunds_its_reservation(
        self, server: Server, unique: str
    ) -> None:
        async with AsyncClient(server.url) as client:
            started = anyio.Event()

            async def work() -> None:
                async with client.reserve({"model": unique}, cost=600):
                    started.set()
                    await anyio.sleep_forever()

            async with anyio.create_task_group() as group:
                group.start_soon(work)
                await started.wait()
                group.cancel_scope.cancel()
            assert (await client.peek({"model": unique})).remaining == 999

    def test_one_client_serves_several_event_loops(self, server: Server, unique: str) -> None:
        client = AsyncClient(server.url)
        for expected in (99, 98, 97):

            async def check_and_close() -> Any:
                verdict = await client.check({"customer": unique})
                await client.close()
                return verdict

            assert asyncio.run(check_and_close()).remaining == expected

    def test_a_client_that_is_not_closed_logs_nothing(self, server: Server) -> None:
        program = f"""
import asyncio, tidegate
client = tidegate.AsyncClient({server.url!r})
assert asyncio.run(client.check({{}})).allowed
assert asyncio.run(client.check({{}})).allowed
"""
        command = [sys.executable, "-c", program]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (ended.stdout, ended.stderr) == ("", "")

    @pytest.mark.anyio
    async def test_exactly_the_limit_passes(self, server: Server, unique: str) -> None:
        async with AsyncClient(server.url, timeout=30) as client:
            verdicts = await asyncio.gather(
                *(client.check({"customer": unique}) for _ in range(150))
            )
        assert sum(verdict.allowed for verdict in verdicts) == 100


def _count_allowed(url: str, customer: str, requests: int) -> int:
    with Client(url, timeout=30) as client, ThreadPoolExecutor(8) as threads:
        verdicts = threads.map(lambda _: client.check({"customer": customer}), range(requests))
        return sum(verdict.allowed for verdict in verdicts)


class TestConcurrency:
    def test_exactly_the_limit_passes_from_two_processes(
        self, server: Server, unique: str
    ) -> None:
        arguments = (server.url, unique, 100)
        with multiprocessing.get_context("spawn").Pool(2) as processes:
            allowed = processes.starmap(_count_allowed, [arguments, arguments])
        assert sum(allowed) == 100

    def test_a_client_made_before_a_fork_works_in_the_child(
        self, server: Server, unique: str
    ) -> None:
        client = Client(server.url)
        assert client.check({"customer": unique}).remaining == 99
        inherited = client._http._pool
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                remaining = client.check({"customer": unique}).remaining
                is_own = client._http._pool is not inherited
                os.write(write, f"{remaining} {is_own}".encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 100) == b"98 True"
        assert client.check({"customer": unique}).remaining == 97


class TestAuthentication:
    def test_the_token(self, start_server: StartServer) -> None:
        server = start_server(http=", token: a-secret-of-the-tests")
        assert Client(server.url, token="a-secret-of-the-tests").check({}).allowed
        for token in (None, "wrong"):
            # A wrong token is a configuration error, so `on_failure` does not hide it.
            client = Client(server.url, token=token, on_failure="open")
            with pytest.raises(tidegate.Unauthorized):
                client.check({})

    def test_the_token_is_not_shown(self) -> None:
        client = Client(token="a-secret-of-the-tests")
        assert "a-secret" not in repr(vars(client)) + repr(vars(client._http))


class TestTls:
    def test_a_private_certificate_authority(
        self, start_server: StartServer, tmp_path: Path
    ) -> None:
        certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
            + ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
            + ["-out", str(certificate), "-keyout", str(key)],
            check=True,
            capture_output=True,
        )
        tls = f", tls: {{certificate: {certificate}, key: {key}}}"
        server = start_server(http=tls, scheme="https")
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert Client(server.url, verify=trusting).check({}).allowed
        with pytest.raises(tidegate.Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            Client(server.url).check({})


class TestFailures:
    def test_a_killed_server(
        self, start_server: StartServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = start_server()
        clients = {policy: Client(server.url, on_failure=policy) for policy in ("open", "closed")}
        raising = Client(server.url)
        for client in (raising, *clients.values()):
            assert client.check({"customer": "a"}).exactness == "exact"
        server.kill()

        with pytest.raises(tidegate.Unavailable, match=server.url):
            raising.check({"customer": "a"})
        allowed = clients["open"].check({"customer": "a"})
        assert allowed.allowed and allowed.exactness == "none" and allowed.reason is None
        denied = clients["closed"].check({"customer": "a"})
        assert not denied.allowed and denied.reason == "unreachable" and denied.is_undecided
        assert denied.retry_after == 1.0
        assert clients["open"].throttle("k", "1/s", peek=True).allowed
        assert not raising.is_healthy()

        with clients["open"].reserve({"model": "m"}) as reservation:
            assert reservation.allowed and reservation.token is None
        with clients["closed"].reserve({"model": "m"}) as reservation:
            assert not reservation.allowed
        with pytest.raises(tidegate.Unavailable):
            raising.reserve({"model": "m"})

        server.start()
        for client in (raising, *clients.values()):
            assert client.check({"customer": "a"}).exactness == "exact"
        messages = [record.getMessage() for record in caplog.records if record.name == "tidegate"]
        # Each client logs the failure once, however many requests fail.
        assert sum("on_failure=open applies" in message for message in messages) == 1
        assert sum("on_failure=closed applies" in message for message in messages) == 1
        assert sum("answers again" in message for message in messages) == 2

    def test_a_reservation_whose_server_is_killed(
        self, start_server: StartServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = start_server()
        with pytest.raises(tidegate.Unavailable):
            with Client(server.url).reserve({"model": "m"}) as reservation:
                server.kill()
        # The token is kept, so that the reservation can be settled again.
        assert reservation.token is not None
        server.start()

        with pytest.raises(ZeroDivisionError):
            with Client(server.url).reserve({"model": "m"}):
                server.kill()
                raise ZeroDivisionError
        server.start()
        with Client(server.url, on_failure="open").reserve({"model": "m"}):
            server.kill()
        assert sum("was not settled" in record.getMessage() for record in caplog.records) == 2
        server.start()

    def test_a_server_that_does_not_answer(self, start_server: StartServer) -> None:
        server = start_server()
        client = Client(server.url, timeout=0.2)
        assert client.check({}).allowed
        server.pause()
        try:
            begin = time.monotonic()
            with pytest.raises(tidegate.Unavailable, match="did not answer within 0.2 s"):
                client.check({})
            assert time.monotonic() - begin < 5
        finally:
            server.resume()

    def test_nothing_listens(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.CRITICAL, "tidegate")
        url = f"http://127.0.0.1:{reserve_port()}"
        assert Client(url, on_failure="open").check({}).allowed
        assert not Client(url, on_failure="closed").check({}).allowed

    def test_a_refused_token_is_not_an_outage(self, server: Server) -> None:
        with pytest.raises(tidegate.InvalidRequest):
            Client(server.url, on_failure="open").check({}, cost=-1)


def test_proxies_of_the_environment_are_not_used(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{reserve_port()}")
    assert Client(server.url).check({}).allowed


def test_connections_are_reused(server: Server, unique: str) -> None:
    client = Client(server.url)
    for _ in range(5):
        client.check({"customer": unique})
    assert client._http._pool.num_connections == 1


@pytest.mark.anyio
async def test_async_connections_are_reused(server: Server, unique: str) -> None:
    async with AsyncClient(server.url) as client:
        sockets: Set[int] = set()
        for _ in range(5):
            await client.check({"customer": unique})
            (session,) = client._http._sessions.values()
            (idle,) = session.connector._conns.values()  # type: ignore[union-attr]
            sockets.update(id(connection) for connection, _ in idle)
        assert len(sockets) == 1
