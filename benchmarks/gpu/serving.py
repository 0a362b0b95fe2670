"""`polymux serve` over one model's folder, in processes of its own, for benchmarks that speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT = 18123


@dataclass
class Server:
    """A server that is ready. Seconds are counted from when its process began."""

    port: int
    began: float
    listening: float
    ready: float
    facts: dict[str, Any]
    """What it says of the model."""
    log: Path


@contextlib.contextmanager
def serve(
    folder: Path, device: str, dtype: str = "bfloat16", engine: Mapping[str, Any] | None = None, shown: int = 2000
) -> Iterator[Server]:
    """Serves the folder as model `m`; `engine` are further settings of its engine. Shows the end of its log."""
    config, log = folder.parent / "polymux.toml", folder.parent / "server.log"
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in (engine or {}).items())
    config.write_text(
        f'[models.m]\nreference = "{folder}"\n[engine]\ndevice = "{device}"\ndtype = "{dtype}"\n{settings}'
        f"[gateway]\nport = {PORT}\n"
    )
    began = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "polymux", "serve", "--quiet", "--config", str(config)], stdout=file, stderr=file
        )
    try:
        listening = None
        while True:
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-3000:])
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=5):
                    break
            except urllib.error.HTTPError:
                listening = listening or time.perf_counter() - began
            except OSError:
                pass
            time.sleep(0.05)
        ready = time.perf_counter() - began
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models") as answer:
            facts = json.load(answer)["data"][0]
        yield Server(PORT, began, listening or ready, ready, facts, log)
    finally:
        process.terminate()
        process.wait(20)
        print(log.read_text()[-shown:], flush=True)


async def post(port: int, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a JSON body on a connection of its own. The reader stands behind the head; raises unless it says 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n" % (path.encode(), len(body)) + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError((head + await reader.read(500)).decode())
    return reader, writer
