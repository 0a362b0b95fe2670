"""Work on an upload begins while it arrives; its answer waits for the whole form, whose fields all count."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from polymux.core.arrival import MOST_ARRIVING, ArrivingFile
from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Done, Heard, Reached, TextDelta, Transcribe
from polymux.core.testing.service import FakeServed, FakeService
from polymux.core.vocabulary import Receipt, Usage

pytestmark = pytest.mark.anyio

PATH = "/v1/audio/transcriptions"
HEADERS = {"content-type": "multipart/form-data; boundary=b"}
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
HALF = bytes(400_000)

WAITING = ThreadPoolExecutor(MOST_ARRIVING)


def write_field(name: str, value: str) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


class Upload:
    """A body of `parts` that stops after the file's first half until `go` is set."""

    def __init__(self, before: bytes, after: bytes = b"") -> None:
        self.go = asyncio.Event()
        self.before, self.after = before, after

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self.before + FILE + HALF
        await self.go.wait()
        yield HALF + b"\r\n" + self.after
        yield b"--b--\r\n"


async def read_all(served: FakeServed, task: str, ask: Transcribe) -> AsyncIterator[Any]:
    """Says what it was told, and how much there was to read."""
    if isinstance(ask.audio, ArrivingFile):
        count, loop = 0, asyncio.get_running_loop()
        while data := await loop.run_in_executor(WAITING, ask.audio.read, count, 1 << 16):
            count += len(data)
            yield Reached(count / 1000)
    else:
        count = Path(str(ask.audio)).stat().st_size
    yield TextDelta(0, f"{ask.language}")
    yield Heard("english", 1.0)
    yield Done(Usage(output_tokens=count, seconds=1.0), Receipt())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeService:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return FakeService((FakeServed("stub", ("transcribe",)),), script=read_all)


async def until(reached: Any) -> None:
    async with asyncio.timeout(60):
        while not reached():
            await asyncio.sleep(0.005)


def post(client: httpx.AsyncClient, upload: Upload) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post(PATH, content=upload.pieces(), headers=HEADERS))


async def test_the_job_runs_before_the_upload_ends(serving: Any, service: FakeService, tmp_path: Path) -> None:
    upload = Upload(write_field("model", "stub") + write_field("language", "en"))
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url, timeout=120) as client:
        answer = post(client, upload)
        await until(lambda: service.running == 1)
        upload.go.set()
        assert (await answer).json()["text"] == "en"
        assert len(service.opened) == 1 and list(tmp_path.iterdir()) == []


async def test_a_field_behind_the_file_counts(serving: Any, service: FakeService, tmp_path: Path) -> None:
    """The work that began without it is stopped, and done again with it."""
    upload = Upload(write_field("model", "stub"), write_field("language", "de"))
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url, timeout=120) as client:
        answer = post(client, upload)
        await until(lambda: service.running == 1)
        upload.go.set()
        assert (await answer).json()["text"] == "de"
        assert len(service.opened) == 2 and service.cancelled == 1 and list(tmp_path.iterdir()) == []


async def test_a_file_before_everything_else_is_read_first(serving: Any, service: FakeService) -> None:
    upload = Upload(b"", write_field("model", "stub") + write_field("language", "fr"))
    upload.go.set()
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url, timeout=120) as client:
        assert (await post(client, upload)).json()["text"] == "fr"
        assert len(service.opened) == 1


async def test_what_is_wrong_with_the_file_is_said_at_once(serving: Any, service: FakeService, tmp_path: Path) -> None:
    async def refuse(*_: Any) -> AsyncIterator[Any]:
        raise InvalidRequest("the file holds no sound", param="file")
        yield

    service.script = refuse
    upload = Upload(write_field("model", "stub"))
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url, timeout=120) as client:
        answer = post(client, upload)
        await until(lambda: service.opened and not service.running)
        upload.go.set()
        assert (await answer).status_code == 400
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("after", "status"),
    [(b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n", 400), (b"--b\r\nbroken", 400)],
)
async def test_a_form_that_breaks_off_has_no_answer(
    serving: Any, service: FakeService, tmp_path: Path, after: bytes, status: int
) -> None:
    """Although the work was done already: its status is that of the whole."""
    upload = Upload(write_field("model", "stub"), after)
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url, timeout=120) as client:
        answer = post(client, upload)
        await until(lambda: service.running == 1)
        upload.go.set()
        assert (await answer).status_code == status
        assert service.running == 0 and list(tmp_path.iterdir()) == []


async def test_an_upload_that_grows_too_large_stops_its_work(
    serving: Any, service: FakeService, tmp_path: Path
) -> None:
    upload = Upload(write_field("model", "stub"))
    async with (
        serving(service, max_upload_bytes=500_000) as running,
        httpx.AsyncClient(base_url=running.url, timeout=120) as client,
    ):
        answer = post(client, upload)
        await until(lambda: service.running == 1)
        upload.go.set()
        assert (await answer).status_code == 413
        await until(lambda: service.cancelled == 1 and list(tmp_path.iterdir()) == [])


async def test_a_client_that_leaves_while_it_sends_stops_the_work(
    serving: Any, service: FakeService, tmp_path: Path
) -> None:
    upload = Upload(write_field("model", "stub"))
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url, timeout=120) as client:
        answer = post(client, upload)
        await until(lambda: service.running == 1)
        answer.cancel()
        await until(lambda: service.running == 0 and list(tmp_path.iterdir()) == [])


async def test_slow_senders_keep_nobody_from_an_answer(serving: Any, service: FakeService) -> None:
    """More of them than are worked on early: the others wait on disk, and whoever is complete is answered."""
    slow = [Upload(write_field("model", "stub")) for _ in range(MOST_ARRIVING + 3)]
    limits = httpx.Limits(max_connections=None)
    async with (
        serving(service) as running,
        httpx.AsyncClient(base_url=running.url, limits=limits, timeout=120) as client,
    ):
        answers = [post(client, upload) for upload in slow]
        await until(lambda: service.running == MOST_ARRIVING)
        whole = Upload(write_field("model", "stub") + write_field("language", "en"))
        whole.go.set()
        assert (await post(client, whole)).json()["text"] == "en"
        for upload in slow:
            upload.go.set()
        assert [(await answer).status_code for answer in answers] == [200] * len(slow)


async def test_progress_for_those_who_ask(client: httpx.AsyncClient, service: FakeService) -> None:
    async def work(served: FakeServed, task: str, ask: Transcribe) -> AsyncIterator[Any]:
        yield TextDelta(0, "Hello")
        yield Reached(30.0)
        yield Done(Usage(), Receipt())

    service.script = work

    async def ask(**fields: str) -> list[str]:
        data = {"model": "stub", "stream": "true", **fields}
        answer = await client.post(PATH, data=data, files={"file": ("a.wav", b"sound")})
        return [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]

    assert not any("progress" in line for line in await ask())
    assert '{"type":"transcript.progress","seconds":30.0}' in await ask(**{"include[]": "progress"})
