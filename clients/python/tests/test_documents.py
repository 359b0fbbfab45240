"""Runs the README's examples against a server with the README's rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
from conftest import StartServer

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> List[str]:
    found: List[str] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return found


def test_the_examples_of_the_readme(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (rules,) = blocks("yaml")
    listen, _, rest = rules.partition("\n")
    assert listen == "listen: {http: 127.0.0.1:8080}"
    server = start_server(rest)
    examples = blocks("python")
    assert len(examples) == 7
    # The examples are parts of one program.
    names: Dict[str, Any] = {}
    for example in examples:
        exec(example.replace("127.0.0.1:8080", server.host), names)
    (first,) = blocks("text")
    # On a busy machine, the fourth request comes a moment later.
    output = re.sub(r"retry in 5\d s", "retry in 60 s", capsys.readouterr().out)
    assert output == f"{first}2\n"
