"""A real Tidegate server for each test module, from the binary `TIDEGATE_BIN`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Callable, Iterator, List, Optional

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
BINARY = Path(os.environ.get("TIDEGATE_BIN", REPOSITORY / "target/debug/tidegate")).resolve()

RULES = """
rules:
  - {name: per-ip, when: {path: /limited}, key: [ip], limits: [3/min]}
  - {name: per-customer, key: [customer], limits: [100/h]}
  - name: queue
    when: {path: /queue}
    key: [ip]
    limits: [{algorithm: leaky_bucket, capacity: 3, leak: 10/s, queue: true}]
  - {name: per-key, key: [header.x-api-key], limits: [2/min]}
  - {name: per-query, key: [query.user], limits: [2/min]}
  - {name: per-cookie, key: [cookie.session], limits: [2/min]}
  - {name: tokens, key: [model], limits: [1000/h]}
  - name: reports
    when: {path: /report}
    key: [customer]
    limits: [{algorithm: concurrency, limit: 1, lease: 30s, wait: 10s}]
  - {name: login-failures, when: {path: /login}, key: [account], limits: [5/min]}
"""


class Server:
    """A Tidegate process with an HTTP listener on a reserved port."""

    def __init__(
        self, folder: Path, rules: str, http: str = "", more: str = "", scheme: str = "http"
    ) -> None:
        self.port = reserve_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.host = f"127.0.0.1:{self.port}"
        listener = f"{{address: {self.host}{http}}}"
        self._config = folder / "tidegate.yaml"
        self._config.write_text(
            f"listen: {{http: {listener}, resp: off, grpc: off, admin: off}}\n{more}\n{rules}"
        )
        self._log = folder / "tidegate.log"
        self._process: Optional[subprocess.Popen[bytes]] = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(BINARY), "serve", "--config", str(self._config)], stdout=log, stderr=log
            )
        wait_until(self._answers, f"{BINARY} to listen")

    def kill(self) -> None:
        """Kills the server, as in a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Suspends the process. The kernel still accepts connections, but nothing responds."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # A thread that is running on another core continues for a moment.
        wait_until(self._is_suspended, "all threads of the server to stop")

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _is_suspended(self) -> bool:
        assert self._process is not None
        stats = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        # The state follows the name, which is in parentheses.
        return all(stat.read_text().rpartition(") ")[2].startswith("T") for stat in stats)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"the server has exited:\n{self._log.read_text()}")
        try:
            httpx.get(self.url, trust_env=False, verify=False)
        except httpx.HTTPError:
            return False
        return True


port_reservations: list[socket.socket] = []


def reserve_port() -> int:
    """Reserves a port until this program ends. The system assigns it to no other socket; a server
    that sets `SO_REUSEADDR` can listen on it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    port_reservations.append(reservation)
    port: int = reservation.getsockname()[1]
    return port


def wait_until(is_true: Callable[[], bool], event: str, timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not is_true():
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout} s for {event}")
        time.sleep(0.02)


StartServer = Callable[..., Server]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers, which are killed at the end of the module."""
    assert BINARY.exists(), f"{BINARY} is missing: build it, or set TIDEGATE_BIN"
    servers: List[Server] = []

    def start(
        rules: str = RULES, http: str = "", more: str = "", scheme: str = "http"
    ) -> Server:
        server = Server(tmp_path_factory.mktemp("server"), rules, http, more, scheme)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Server:
    return start_server()


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A unique string for the keys of a test."""
    return f"{request.node.nodeid}-{time.time_ns()}"


class RedisServer:
    """A Redis process on a reserved port."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        assert program is not None, "redis-server is missing: run scripts/setup"
        self.port = reserve_port()
        self._process = subprocess.Popen(
            [program, "--port", str(self.port), "--save", "", "--bind", "127.0.0.1"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        wait_until(self._accepts, "redis-server to listen")

    def _accepts(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()
