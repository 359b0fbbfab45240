"""Replaces the `conftest.py` of the test suite of `limits`: starts one Tidegate server.

`run` copies this file into the suite, under that name.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tidegate.limits import AsyncTidegateStorage, TidegateStorage


def pytest_configure(config: pytest.Config) -> None:
    # The socket does not listen, so the server can. No other program gets the port meanwhile.
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    config.add_cleanup(reservation.close)
    host = f"127.0.0.1:{reservation.getsockname()[1]}"
    folder = Path(tempfile.mkdtemp())
    rules = folder / "tidegate.yaml"
    rules.write_text(f"listen: {{http: {host}, resp: off, grpc: off, admin: off}}\nrules: []\n")
    with (folder / "log").open("w") as log:
        command = [os.environ["TIDEGATE_BIN"], "serve", "--config", str(rules)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    config.add_cleanup(server.kill)
    # `tests/utils.py` reads this variable when it is imported.
    os.environ["TIDEGATE_HOST"] = host
    storage = TidegateStorage(f"tidegate://{host}")
    end = time.monotonic() + 30
    while not storage.check():
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def empty_storage(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Gives each test a unique key prefix. The original deletes all Redis keys instead."""
    prefix = f"{request.node.nodeid}-{time.time_ns()}"
    for storage in (TidegateStorage, AsyncTidegateStorage):
        defaults = {**(storage.__init__.__kwdefaults__ or {}), "key_prefix": prefix}
        monkeypatch.setattr(storage.__init__, "__kwdefaults__", defaults)
