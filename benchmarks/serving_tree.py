"""What `polymux serve` costs with all starters: seconds until it is ready, and memory once each of them has answered.

python benchmarks/serving_tree.py      a second start: everything is fetched and converted already

Memory is that of the whole tree of processes, what they share counted once (PSS).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from ledger import record
from openai import OpenAI


def measure_memory(root: int) -> int:
    """Bytes of a process and all below it."""
    server = psutil.Process(root)
    return sum(each.memory_full_info().pss for each in [server, *server.children(recursive=True)])


def ask_all(client: OpenAI) -> None:
    """One request of each starter."""
    hello = [{"role": "user", "content": "Say hello."}]
    client.chat.completions.create(model="starter/chat", messages=hello, max_tokens=16)
    client.embeddings.create(model="starter/embed", input="hello")
    spoken = client.audio.speech.create(
        model="starter/speak", voice="heart", input="Hello there.", response_format="wav"
    )
    client.audio.transcriptions.create(model="starter/transcribe", file=("hello.wav", spoken.content))
    picture = client.images.generate(model="starter/paint", prompt="a red circle").data[0].b64_json
    seen = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    question = [seen, {"type": "text", "text": "What colour is it?"}]
    client.chat.completions.create(model="starter/see", messages=[{"role": "user", "content": question}])
    client.embeddings.create(model="starter/look", input=[seen])  # type: ignore[list-item]  # a part of a chat
    client.videos.create_and_poll(model="starter/film", prompt="a red circle moving right", poll_interval_ms=200)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        begun = time.monotonic()
        with log.open("w") as file:
            command = [sys.executable, "-m", "polymux", "serve", "--port", "0"]
            server = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)
        try:
            while not (ready := re.search(r"ready: (\S+/v1)", log.read_text())):
                if server.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            record("starters", "all eight: a second start, until they answer", time.monotonic() - begun, "s")
            ask_all(OpenAI(base_url=ready[1], api_key="none"))
            memory = measure_memory(server.pid) / 2**30
            record("starters", "all eight: memory of all processes, after an answer of each", memory, "GiB")
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
