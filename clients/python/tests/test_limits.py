"""The storages for the package `limits`, with the memory store and with Redis."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import pytest
from conftest import RULES, RedisServer, Server, StartServer
from limits import RateLimitItem, parse
from limits.aio import strategies as async_strategies
from limits.errors import ConfigurationError, StorageError
from limits.storage import storage_from_string
from limits.strategies import (
    STRATEGIES,
    FixedWindowRateLimiter,
    MovingWindowRateLimiter,
    SlidingWindowCounterRateLimiter,
)

import tidegate
from tidegate.limits import AsyncTidegateStorage, TidegateStorage


@pytest.fixture(scope="module", params=["memory", "redis"])
def server(request: pytest.FixtureRequest, start_server: StartServer) -> Server:
    """A server with each of the two stores."""
    if request.param == "memory":
        return start_server()
    redis: RedisServer = request.getfixturevalue("redis")
    # The timeout is long, because the test machine may be busy.
    store = f'store: {{redis: "redis://127.0.0.1:{redis.port}", timeout: 5s}}'
    return start_server(RULES, more=store)


@pytest.fixture
def storage(server: Server, unique: str) -> TidegateStorage:
    return TidegateStorage(f"tidegate://{server.host}", key_prefix=unique)


@pytest.fixture(params=list(STRATEGIES))
def strategy(request: pytest.FixtureRequest) -> Any:
    return STRATEGIES[request.param]


def start_of_window(item: RateLimitItem) -> None:
    """Waits until an epoch window of this length has at least a second left."""
    left = item.get_expiry() - time.time() % item.get_expiry()
    if left < 1:
        time.sleep(left + 0.01)


def test_the_schemes(server: Server) -> None:
    assert isinstance(storage_from_string(f"tidegate://{server.host}"), TidegateStorage)
    assert isinstance(storage_from_string(f"async+tidegate://{server.host}"), AsyncTidegateStorage)
    assert isinstance(storage_from_string(f"tidegates://{server.host}"), TidegateStorage)
    for wrong in ("tidegate://", "tidegate://host", "tidegate://host:x", "tidegate://host:1/0"):
        with pytest.raises(ConfigurationError, match="storage URL"):
            storage_from_string(wrong)


def test_exactly_the_limit_passes(storage: TidegateStorage, strategy: Any) -> None:
    item = parse("10/minute")
    start_of_window(item)
    limiter = strategy(storage)
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(lambda _: limiter.hit(item, "user"), range(40))) == 10
    assert not limiter.test(item, "user")
    assert limiter.test(item, "other")
    stats = limiter.get_window_stats(item, "user")
    assert stats.remaining == 0
    assert 0 < stats.reset_time - time.time() <= 60


def _count_hits(uri: str, prefix: str, strategy: str) -> int:
    limiter = STRATEGIES[strategy](TidegateStorage(uri, key_prefix=prefix, timeout=30))
    with ThreadPoolExecutor(4) as threads:
        return sum(threads.map(lambda _: limiter.hit(parse("50/hour"), "user"), range(40)))


def test_exactly_the_limit_passes_from_two_processes(server: Server, unique: str) -> None:
    start_of_window(parse("50/hour"))
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        for strategy in STRATEGIES:
            arguments = (f"tidegate://{server.host}", unique, strategy)
            assert sum(processes.starmap(_count_hits, [arguments, arguments])) == 50


def test_cost(storage: TidegateStorage, strategy: Any) -> None:
    item = parse("10/minute")
    start_of_window(item)
    limiter = strategy(storage)
    assert limiter.hit(item, "user", cost=7)
    assert limiter.test(item, "user", cost=3)
    assert not limiter.test(item, "user", cost=4)
    assert limiter.get_window_stats(item, "user").remaining == 3
    assert limiter.hit(item, "user", cost=0)
    assert limiter.hit(item, "user", cost=3)
    assert not limiter.hit(item, "user", cost=1)
    assert not limiter.hit(item, "another", cost=11)


def test_clear(storage: TidegateStorage, strategy: Any) -> None:
    item = parse("2/minute")
    start_of_window(item)
    limiter = strategy(storage)
    assert [limiter.hit(item, "user") for _ in range(3)] == [True, True, False]
    limiter.clear(item, "user")
    assert limiter.get_window_stats(item, "user").remaining == 2
    assert [limiter.hit(item, "user") for _ in range(3)] == [True, True, False]


def test_strategies_do_not_share_counts(storage: TidegateStorage) -> None:
    item = parse("1/minute")
    for strategy in STRATEGIES.values():
        assert strategy(storage).hit(item, "user")


class TestFixedWindow:
    def test_the_counter_goes_on_above_the_limit(self, storage: TidegateStorage) -> None:
        assert storage.incr("k", 60) == 1
        assert storage.incr("k", 60, 10) == 11
        assert storage.get("k") == 11

    def test_the_window_begins_with_the_first_hit(self, storage: TidegateStorage) -> None:
        key = parse("9 per 2 second").key_for("user")
        assert storage.get_expiry(key) == pytest.approx(time.time(), abs=1)
        storage.incr(key, 2)
        end = storage.get_expiry(key)
        assert end == pytest.approx(time.time() + 2, abs=0.5)
        time.sleep(0.5)
        storage.incr(key, 2)
        assert storage.get_expiry(key) == pytest.approx(end, abs=0.1)
        time.sleep(max(0, end - time.time() + 0.05))
        assert storage.get(key) == 0
        assert storage.incr(key, 2) == 1

    @pytest.mark.parametrize("limit", ["9/second", "9/minute", "9 per 7 day", "9/year"])
    @pytest.mark.parametrize("user", ["user", "u" * 5000], ids=["short", "long"])
    def test_a_reader_finds_the_window_in_the_key(
        self, storage: TidegateStorage, limit: str, user: str
    ) -> None:
        """`get` and `get_expiry` do not have a parameter for the window."""
        item = parse(limit)
        key = item.key_for(user)
        storage.incr(key, item.get_expiry())
        left = storage.get_expiry(key) - time.time()
        assert storage.get(key) == 1
        assert item.get_expiry() - 0.9 < left <= item.get_expiry() + 0.01

    def test_the_count_of_another_key(self, storage: TidegateStorage) -> None:
        for key, window in (("k", 60), ("k/minute", 3600), ("a/1/x/minute", 1)):
            storage.incr(key, window, 3)
            assert storage.get(key) == 3


class TestMovingWindow:
    def test_reset_is_when_the_oldest_entry_expires(self, storage: TidegateStorage) -> None:
        limiter = MovingWindowRateLimiter(storage)
        item = parse("3 per 2 second")
        begin = time.time()
        assert limiter.hit(item, "user")
        time.sleep(1)
        assert limiter.hit(item, "user", cost=2) and not limiter.hit(item, "user")
        stats = limiter.get_window_stats(item, "user")
        assert stats.reset_time == pytest.approx(begin + 2, abs=0.3)
        assert stats.remaining == 0
        time.sleep(max(0, stats.reset_time - time.time() + 0.01))
        assert limiter.hit(item, "user") and not limiter.hit(item, "user")

    def test_an_empty_window(self, storage: TidegateStorage) -> None:
        start, count = storage.get_moving_window("k", 3, 60)
        assert count == 0 and start == pytest.approx(time.time(), abs=1)

    def test_a_limit_that_is_too_large(self, storage: TidegateStorage) -> None:
        with pytest.raises(tidegate.InvalidRequest, match="limit.*100000"):
            storage.acquire_entry("k", 100_001, 60)


class TestSlidingWindowCounter:
    def test_the_weighted_count(self, storage: TidegateStorage) -> None:
        item = parse("10 per 2 second")
        start_of_window(item)
        limiter = SlidingWindowCounterRateLimiter(storage)
        assert limiter.hit(item, "user", cost=10)
        assert not limiter.hit(item, "user")
        previous, _, current, left = storage.get_sliding_window(item.key_for("user"), 2)
        # The server reports only the weighted sum, which is the current count here.
        assert (previous, current) == (0, 10)
        assert 2 < left <= 4
        # Half a window later, half of the previous window's count is left.
        time.sleep(left - 2 + 1)
        assert 3 <= limiter.get_window_stats(item, "user").remaining <= 6


def test_long_and_unusual_keys(storage: TidegateStorage) -> None:
    for key in ("k" * 5000, "é" * 600, "\ud800", 'a"b\\c\n\0', "ü/%"):
        assert storage.incr(key, 60) == 1
        assert storage.incr(key, 60) == 2
    assert storage.incr("k" * 5001, 60) == 1


def test_reset_is_not_supported(storage: TidegateStorage) -> None:
    with pytest.raises(NotImplementedError, match="use clear"):
        storage.reset()


class TestAsync:
    @pytest.mark.parametrize("name", list(async_strategies.STRATEGIES))
    def test_exactly_the_limit_passes(self, server: Server, unique: str, name: str) -> None:
        item = parse("10/minute")
        start_of_window(item)

        async def hits() -> int:
            uri = f"async+tidegate://{server.host}"
            storage = AsyncTidegateStorage(uri, key_prefix=unique, timeout=30)
            assert await storage.check()
            strategy: Any = async_strategies.STRATEGIES[name]
            limiter = strategy(storage)
            passed = await asyncio.gather(*(limiter.hit(item, "user") for _ in range(40)))
            assert not await limiter.test(item, "user")
            assert (await limiter.get_window_stats(item, "user")).remaining == 0
            await limiter.clear(item, "user")
            assert (await limiter.get_window_stats(item, "user")).remaining == 10
            assert await storage.get(item.key_for("user")) == 0
            assert await storage.get_expiry("k") == pytest.approx(time.time(), abs=1)
            with pytest.raises(NotImplementedError):
                await storage.reset()
            return sum(passed)

        assert asyncio.run(hits()) == 10


class TestFailures:
    @pytest.mark.parametrize(
        "call",
        [
            lambda storage: storage.incr("k", 60),
            lambda storage: storage.get("k"),
            lambda storage: storage.get_expiry("k"),
            lambda storage: storage.clear("k"),
            lambda storage: storage.acquire_entry("k", 1, 60),
            lambda storage: storage.get_moving_window("k", 1, 60),
            lambda storage: storage.acquire_sliding_window_entry("k", 1, 60),
            lambda storage: storage.get_sliding_window("k", 60),
            lambda storage: storage.clear_sliding_window("k", 60),
        ],
    )
    def test_without_a_server(self, call: Callable[[TidegateStorage], Any]) -> None:
        with pytest.raises(tidegate.Unavailable):
            call(TidegateStorage("tidegate://127.0.0.1:1"))
        with pytest.raises(StorageError) as caught:
            call(TidegateStorage("tidegate://127.0.0.1:1", wrap_exceptions=True))
        assert isinstance(caught.value.storage_error, tidegate.Unavailable)

    def test_check_without_a_server(self) -> None:
        assert not TidegateStorage("tidegate://127.0.0.1:1").check()

    def test_a_killed_server(self, start_server: StartServer) -> None:
        server = start_server()
        limiter = FixedWindowRateLimiter(TidegateStorage(f"tidegate://{server.host}"))
        assert limiter.hit(parse("1/minute"), "user")
        server.kill()
        with pytest.raises(tidegate.Unavailable):
            limiter.hit(parse("1/minute"), "user")
        server.start()
        assert limiter.hit(parse("1/minute"), "user")

    def test_a_store_that_cannot_decide(
        self, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        redis = RedisServer(tmp_path_factory.mktemp("redis"))
        url = f"redis://127.0.0.1:{redis.port}"
        store = f'store: {{redis: "{url}", timeout: 5s, on_failure: closed}}'
        storage = TidegateStorage(f"tidegate://{start_server(more=store).host}")
        assert storage.incr("k", 60) == 1
        redis.kill()
        with pytest.raises(tidegate.Unavailable, match="the store could not decide"):
            storage.incr("k", 60)
        with pytest.raises(tidegate.Unavailable, match="the store could not decide"):
            storage.acquire_entry("k", 1, 60)
        assert not storage.check()

    def test_the_token(self, start_server: StartServer) -> None:
        server = start_server(http=", token: a-secret-of-the-tests")
        assert TidegateStorage(f"tidegate://:a-secret-of-the-tests@{server.host}").check()
        option = TidegateStorage(f"tidegate://{server.host}", token="a-secret-of-the-tests")
        assert option.incr("k", 60) == 1
        with pytest.raises(tidegate.Unauthorized):
            TidegateStorage(f"tidegate://{server.host}").incr("k", 60)
