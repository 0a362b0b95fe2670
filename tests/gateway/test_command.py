"""`polymux serve` on the command line, and where its log lines go."""

from __future__ import annotations

import io
import logging
import socket
from typing import Any

import pytest

from polymux.core.cli import run
from polymux.gateway.lines import LineHandler


def test_serve_is_a_verb(capsys: Any) -> None:
    assert run(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--host", "--port", "--insecure", "--config", "--plugin-dir"):
        assert option in text


def test_an_open_address_without_a_key_is_refused_before_anything_is_loaded(capsys: Any) -> None:
    assert run(["serve", "--host", "0.0.0.0"]) == 2
    assert "--insecure" in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_anything_is_loaded(capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("polymux.access", logging.INFO, "", 0, "%s", (text,), None)


def test_lines_are_written_in_order_and_at_the_end() -> None:
    stream = io.StringIO()
    handler = LineHandler(stream)
    for number in range(1000):
        handler.emit(record(str(number)))
    handler.close()
    assert stream.getvalue() == "".join(f"{number}\n" for number in range(1000))


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("closed")])
def test_a_reader_that_is_gone_does_not_matter(error: Exception) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    handler = LineHandler(Gone())
    handler.emit(record("x"))
    handler.close()
    handler.emit(record("y"))
