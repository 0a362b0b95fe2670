"""What the gateway adds to a request: latency at a fixed rate of arrivals, and stalls of its event loop.

The server runs in its own process over a service whose tokens cost nothing, so all the time measured is the
gateway's. The peer is a bare Starlette application with the same server, the same bytes in and about as many out.
Arrivals are open-loop (evenly spaced, whatever the answers do); latency counts from the first byte sent to the last
byte read.
Rounds alternate between the two; the median round is reported.

On a machine that others use too, measure the gateway and not the neighbours: `chrt -f 5 python benchmarks/gateway.py`
runs all three processes before everybody else; the results say so.

    python benchmarks/gateway.py [--rate 200] [--seconds 5] [--rounds 5] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from ledger import RESULTS, describe_cpu, record

PEER = "bare Starlette echo"
TOKENS = 16
BODY = {
    "model": "stub",
    "messages": [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "word " * 100}],
    "temperature": 0.7,
    "max_tokens": TOKENS,
}
LIMITS = {"p99_ms": 5.0, "stall_ms": 50.0}


# ---- the servers, each a process of its own ------------------------------------------------------------------------


class Stalls:
    """Notices when the event loop came back late: a sleep of 2 ms that took longer."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.task: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(0.002)
            self.longest = max(self.longest, time.perf_counter() - begin - 0.002)

    async def report(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if self.task is None:
            self.task = asyncio.create_task(self.watch())
        longest, self.longest = self.longest, 0.0
        return JSONResponse({"longest_ms": longest * 1000})


async def speak_at_once(served: Any, task: str, ask: Any) -> AsyncIterator[Any]:
    from polymux.core.tasks import ChoiceEnded, Done, TextDelta
    from polymux.core.vocabulary import Receipt, Usage

    for _ in range(TOKENS):
        yield TextDelta(0, " token")
    yield ChoiceEnded(0, "length")
    yield Done(Usage(input_tokens=100, output_tokens=TOKENS), Receipt(launches=TOKENS))


def serve_gateway() -> None:
    from starlette.routing import Route

    from polymux.core.testing.service import FakeService
    from polymux.gateway.app import create_app
    from polymux.gateway.command import start_access_log
    from polymux.gateway.server import bind_socket, run_server
    from polymux.gateway.settings import GatewaySettings

    settings = GatewaySettings(port=0, api_keys=("benchmark",))
    service = FakeService(script=speak_at_once, keep=False)
    app = create_app(service, settings, extra_routes=[Route("/stalls", Stalls().report)])
    listener = bind_socket(settings)
    print(listener.getsockname()[1], file=sys.stderr, flush=True)
    start_access_log()
    run_server(app, service, listener)


def serve_peer() -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from polymux.gateway.server import bind_socket
    from polymux.gateway.settings import GatewaySettings

    async def echo(request: Request) -> Response:
        body = json.loads(await request.body())
        if not body.get("stream"):
            return JSONResponse({"text": " token" * TOKENS})

        async def frames() -> AsyncIterator[bytes]:
            for _ in range(TOKENS + 2):
                yield b'data: {"choices":[{"index":0,"delta":{"content":" token"}}]}\n\n'

        return StreamingResponse(frames(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", echo, methods=["POST"]), Route("/stalls", Stalls().report)])
    listener = bind_socket(GatewaySettings(port=0))
    print(listener.getsockname()[1], file=sys.stderr, flush=True)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    asyncio.Runner(loop_factory=config.get_loop_factory()).run(uvicorn.Server(config).serve(sockets=[listener]))


@contextlib.contextmanager
def start(which: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", which], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        yield int(process.stderr.readline())
    finally:
        process.kill()
        process.wait()


# ---- the load: the thinnest client there is, so that it measures the server and not itself --------------------------


class Connections:
    """Kept-alive connections to one port; as many as there are requests under way."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer benchmark\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.decode())
        if b"chunked" in answer:
            content = await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            content = await reader.readexactly(length)
        self.idle.append((reader, writer))
        return content


async def load(port: int, body: bytes, rate: float, seconds: float) -> list[float]:
    """Latencies in seconds, one per request."""
    connections = Connections(port)
    latencies: list[float] = []

    async def one() -> None:
        begin = time.perf_counter()
        await connections.ask("POST", "/v1/chat/completions", body)
        latencies.append(time.perf_counter() - begin)

    begin = time.perf_counter() + 0.05
    tasks = []
    for index in range(int(rate * seconds)):
        due = begin + index / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return latencies


async def read_stall(port: int) -> float:
    return json.loads(await Connections(port).ask("GET", "/stalls"))["longest_ms"]


def measure(port: int, streamed: bool, rate: float, seconds: float) -> dict[str, float]:
    body = json.dumps({**BODY, "stream": streamed}).encode()

    async def run() -> dict[str, float]:
        await load(port, body, rate, 0.5)  # warm
        await read_stall(port)
        latencies = sorted(await load(port, body, rate, seconds))
        return {
            "p50_ms": 1000 * statistics.median(latencies),
            "p99_ms": 1000 * latencies[int(0.99 * len(latencies))],
            "stall_ms": await read_stall(port),
        }

    return asyncio.run(run())


# ---- the report ----------------------------------------------------------------------------------------------------


def compare(rate: float, seconds: float, rounds: int) -> list[tuple[str, float, float]]:
    """(metric, ours, the peer's), medians of the rounds."""
    figures = []
    with start("gateway") as gateway, start("peer") as peer:
        for streamed in (False, True):
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(measure(gateway, streamed, rate, seconds))
                theirs.append(measure(peer, streamed, rate, seconds))
            for metric in ours[0]:
                value = statistics.median(each[metric] for each in ours)
                peer_value = statistics.median(each[metric] for each in theirs)
                figures.append((f"{'stream' if streamed else 'whole'}_{metric}_at_{rate:.0f}_per_s", value, peer_value))
    return figures


def is_first() -> bool:
    return os.sched_getscheduler(0) == os.SCHED_FIFO


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument("--serve", choices=["gateway", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        {"gateway": serve_gateway, "peer": serve_peer}[options.serve]()
        return 0
    figures = compare(options.rate, options.seconds, options.rounds)
    hardware = describe_cpu() + (", scheduled first" if is_first() else "")
    for metric, value, peer_value in figures:
        print(f"{metric}: {value:.2f} ms, {PEER} {peer_value:.2f} ms")
        if options.record:
            record("gateway", metric, value, "ms", peer=PEER, peer_value=peer_value, hardware=hardware)
    return int(any(value > limit for metric, value, _ in figures for key, limit in LIMITS.items() if key in metric))


if __name__ == "__main__":
    sys.exit(main())
