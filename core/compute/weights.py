"""Reading a model's weights straight to a card, with threads that need the interpreter only between two pieces.

What is imported meanwhile costs no further time: `read_ahead` begins before the libraries are there that want the
weights, and `Reading.take` is called when they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

INDEX, WHOLE, ADAPTER = "model.safetensors.index.json", "model.safetensors", "adapter_config.json"

READERS = 8
"""Threads. One copies 2 to 4 GB/s out of the page cache, and a card takes 50."""

PIECE = 32 << 20
"""Bytes that a thread reads at once; it has room for two, one of which is on its way."""

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class _Piece:
    file: int
    offset: int
    """In the file."""
    target: Tensor
    """uint8, on the device."""


class Reading:
    """Weights that are on their way."""

    def __init__(self, files: list[Path], device: torch.device) -> None:
        """Raises `OSError` or `ValueError` for files that cannot be read."""
        self._device = device
        self._weights: dict[str, Tensor] = {}
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._files = [path.open("rb", buffering=0) for path in files]
        if device.type == "cuda":
            torch.empty(sum(path.stat().st_size for path in files), dtype=torch.uint8, device=device)  # at one stroke
        for file in self._files:
            for piece in self._lay_out(file.fileno()):
                self._pieces.put(piece)
        if device.type == "cuda":  # what had the memory before is done with it
            torch.cuda.current_stream(device).synchronize()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
        for _ in range(READERS):
            self._pieces.put(None)
        self._done: list[Future[None]] = [self._readers.submit(self._read) for _ in range(READERS)]
        self._readers.shutdown(wait=False)

    def take(self) -> dict[str, Tensor]:
        """The weights by name, all of them there. Raises `OSError` where a file could not be read. Once only."""
        try:
            for done in self._done:
                done.result()
        finally:
            self._close()
        weights, self._weights = self._weights, {}
        return weights

    def _lay_out(self, file: int) -> Iterator[_Piece]:
        """Room for the tensors of a safetensors file, and what is to be read into it."""
        size = os.fstat(file).st_size
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        if not 0 < length <= size - 8:
            raise ValueError("a file of weights has no whole header")
        layout: dict[str, Any] = json.loads(os.pread(file, length, 8))
        layout.pop("__metadata__", None)
        for name, each in layout.items():
            begin, end = (8 + length + place for place in each["data_offsets"])
            tensor = torch.empty(each["shape"], dtype=DTYPES[each["dtype"]], device=self._device)
            if tensor.nbytes != end - begin or end > size:
                raise ValueError(f"a file of weights does not hold all of {name}")
            self._weights[name] = tensor
            target = tensor.view(-1).view(torch.uint8)
            for first in range(0, tensor.nbytes, PIECE):
                yield _Piece(file, begin + first, target[first : first + PIECE])

    def _read(self) -> None:
        on_card = self._device.type == "cuda"
        room = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=on_card) for _ in range(2)]
        stream = torch.cuda.Stream(self._device) if on_card else None
        sent = [torch.cuda.Event() if on_card else None for _ in room]
        turn = 0
        while (piece := self._pieces.get()) is not None:
            turn = 1 - turn
            if (event := sent[turn]) is not None:
                event.synchronize()
            source = room[turn][: piece.target.numel()]
            _fill(piece.file, piece.offset, memoryview(source.numpy()))
            with torch.cuda.stream(stream):
                piece.target.copy_(source, non_blocking=True)
                if event is not None:
                    event.record(stream)
        if stream is not None:
            stream.synchronize()

    def _close(self) -> None:
        for file in self._files:
            file.close()


def _fill(file: int, offset: int, room: memoryview) -> None:
    while room:
        count = os.preadv(file, [room], offset)
        if not count:
            raise OSError("the file ends before its last weight")
        room, offset = room[count:], offset + count


def read_ahead(folder: Path, device: torch.device) -> Reading | None:
    """Begin to read the weights of a folder onto a card.

    None where it is left to transformers: on a CPU, which maps files, and for weights in other files or formats.
    """
    if device.type != "cuda" or not hasattr(os, "preadv"):
        return None
    try:
        files = find_files(folder)
        return Reading(files, device) if files else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError):  # broken, or there is no room
        return None  # whoever loads it says what is wrong


def find_files(folder: Path) -> list[Path]:
    """The files that transformers would read, or none of them."""
    config = folder / "config.json"
    if not config.is_file() or "quantization_config" in config.read_text() or (folder / ADAPTER).is_file():
        return []
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        names = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return [folder / name for name in dict.fromkeys(names)]
    return []
