"""A real Tidegate server, from the binary `TIDEGATE_BIN`, in front of the fake model server."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Iterator

import pytest

from fake_model import FakeModel

BINARY = os.environ["TIDEGATE_BIN"]

RULES = """
listen: {{http: 127.0.0.1:{api}, resp: off, grpc: off, admin: off}}
proxy:
  listen: 127.0.0.1:{port}
  upstreams: [{{name: model, urls: ["{model}"]}}]
rules:
  - name: tokens
    when: {{path: "/v1/**", method: POST}}
    key: [header.x-test]
    limits: [{{algorithm: fixed_window, limit: 1000000, window: 1d}}]
    cost: {{json: [/max_completion_tokens, /max_tokens, /max_output_tokens], default: 4096, times: /n}}
    settle: usage
    count: {{status: "2*"}}
  - name: tokens-per-minute
    when: {{header.x-limit: "yes", method: POST}}
    key: [header.x-test]
    limits: [{{algorithm: sliding_window_counter, limit: 1000, window: 1min, buckets: 60}}]
    cost: {{json: [/max_completion_tokens, /max_tokens], default: 4096, input: estimate}}
    settle: usage
  - name: reserved-tokens
    when: {{model: {{present: true}}}}
    key: [model]
    limits: [{{algorithm: sliding_window_counter, limit: 1000, window: 1min, buckets: 60}}]
"""

LIMIT = 1_000_000


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


class Gateway:
    """Tidegate's proxy in front of the fake model server."""

    def __init__(self, folder: Path, model: FakeModel) -> None:
        self.model = model
        self.port, self.api_port = reserve_port(), reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.api_url = f"http://127.0.0.1:{self.api_port}"
        config = folder / "tidegate.yaml"
        config.write_text(RULES.format(port=self.port, api=self.api_port, model=model.url))
        self._log = folder / "tidegate.log"
        with self._log.open("wb") as log:
            command = [BINARY, "serve", "--config", str(config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(300):
            if self._process.poll() is not None:
                raise AssertionError(f"the server has exited:\n{self._log.read_text()}")
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"the server does not listen:\n{self._log.read_text()}")

    def charged(self, key: str) -> int:
        """Returns the tokens that the rule `tokens` has charged to `key`.

        This method's own request reserves one token, which is refunded.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        body = json.dumps({"max_tokens": 1})
        connection.request("POST", "/v1/probe", body, {"x-test": key})
        response = connection.getresponse()
        response.read()
        assert response.status == 200, response.status
        header = response.getheader("ratelimit")
        remaining = re.search(r";r=(\d+)", header or "")
        assert remaining, header
        connection.close()
        return LIMIT - int(remaining[1]) - 1

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    model = FakeModel()
    gateway = Gateway(tmp_path_factory.mktemp("tidegate"), model)
    yield gateway
    gateway.close()
    model.close()
