"""A file that arrives is read behind its writer: whoever is ahead waits, nobody waits for what will not come."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from polymux.core.arrival import ArrivingFile, arrives
from polymux.core.errors import InternalError


class Ask(msgspec.Struct):
    name: str
    file: ArrivingFile | str


def test_a_reader_gets_every_byte_in_order():
    file, got = ArrivingFile(), []

    def read() -> None:
        while data := file.read(sum(map(len, got)), 7):
            got.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(50):
        file.write(bytes([number]) * number)
    file.finish()
    reader.join(30)
    assert b"".join(got) == b"".join(bytes([number]) * number for number in range(50))
    assert file.size == sum(range(50)) and Path(file.path).stat().st_size == file.size
    file.close()
    assert not Path(file.path).exists()


@pytest.mark.parametrize("wait", [lambda file: file.read(3, 10), lambda file: file.wait()], ids=["read", "wait"])
def test_who_waits_for_a_sender_that_left_is_told(wait):
    file, errors = ArrivingFile(), []
    file.write(b"abc")
    started = threading.Event()

    def read() -> None:
        started.set()
        with pytest.raises(InternalError) as caught:
            wait(file)
        errors.append(caught.value)

    reader = threading.Thread(target=read)
    reader.start()
    started.wait(30)
    file.close()
    reader.join(30)
    assert len(errors) == 1
    file.close()  # once more does no harm


def test_an_ask_takes_patience_only_while_its_file_arrives():
    file = ArrivingFile()
    assert arrives(Ask("a", file)) and not arrives(Ask("a", "path"))
    file.finish()
    assert not arrives(Ask("a", file))
    file.close()
