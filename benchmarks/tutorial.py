"""The tutorial walked word by word in an environment of its own, with a clock beside it.

python benchmarks/tutorial.py            everything installed by pip, as a stranger would
python benchmarks/tutorial.py --here     polymux installed as a wheel, what it stands on taken from this environment

Files are written as the page shows them, its commands and programs run in their order. Then it is looked at what the
page promises: an answer over HTTP that streams, a place in /docs and in /metrics, a check that passes, and, once
installed, a plugin that is found without --plugin-dir. The page's `polymux serve` runs on a free port.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from ledger import describe_cpu, record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plugins" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROJECT = "my-plugin"


class Walk:
    """One walk in `home`. `took` says how long what took, in seconds."""

    def __init__(self, home: Path, *, here: bool) -> None:
        self.home = home
        self.here = here
        self.took: dict[str, float] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.bin = home / "environment" / "bin"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "POLYMUX_HOME": str(home / "cache"),
        }
        self.server: subprocess.Popen[bytes] | None = None

    def install(self) -> None:
        """An environment with polymux as a wheel, and with pytest, for the check."""
        began = time.perf_counter()
        source = self.home / "source"
        kept = shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, source, ignore=kept)
        wheels = self.home / "wheels"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        self.call([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)])
        (wheel,) = wheels.glob("polymux-*.whl")
        place, python = self.bin.parent, str(self.bin / "python")
        if self.here:
            self.call([sys.executable, "-m", "venv", "--without-pip", str(place)])
            (packages,) = (place / "lib").glob("python*/site-packages")
            (packages / "beside.pth").write_text("\n".join(path for path in sys.path if path in all_packages()) + "\n")
            self.call([*pip, "--python", python, "install", "--no-deps", "--no-index", str(wheel)])
        else:
            self.call([sys.executable, "-m", "venv", str(place)])
            self.call([python, "-m", "pip", "-q", "install", str(wheel), "pytest"])
        self.took["environment"] = time.perf_counter() - began

    def call(self, command: list[str], code: str = "") -> str:
        done = subprocess.run(
            command, cwd=self.home, env=self.environment, input=code, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{code}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def walk(self) -> None:
        """The page from its first block to its last."""
        began = time.perf_counter()
        for language, title, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            code = code.replace("http://127.0.0.1:8000", self.url)
            start = time.perf_counter()
            if title:
                (self.home / PROJECT / title).parent.mkdir(parents=True, exist_ok=True)
                (self.home / PROJECT / title).write_text(code)
            elif language == "text" and code.startswith("polymux serve"):
                self.serve(code)
                self.took["from `serve` to ready"] = time.perf_counter() - start
                self.took["from an empty folder to a server that is ready"] = time.perf_counter() - began
            elif language == "python":
                self.call([str(self.bin / "python"), "-"], code)
            elif language == "javascript":
                if shutil.which("node"):
                    self.call(["node", "--input-type=module", "-"], code)
            else:
                self.call(["bash", "-eu", "-s"], self.offline(code))
                if "plugin check" in code:
                    self.took["the check"] = time.perf_counter() - start
        self.took["the whole page"] = time.perf_counter() - began

    def offline(self, code: str) -> str:
        """Without a network, `pip install -e` builds with what is here: an isolated build fetches setuptools."""
        if not self.here:
            return code
        return code.replace("pip install -e", "python -m pip install -q --no-deps --no-build-isolation -e")

    def serve(self, code: str) -> None:
        log = (self.home / "server.log").open("wb")
        command = f"exec {code.strip()} --port {self.port}"
        self.server = subprocess.Popen(
            ["bash", "-c", command], cwd=self.home, env=self.environment, stdout=log, stderr=subprocess.STDOUT
        )
        while not self.is_ready():
            if self.server.poll() is not None:
                raise SystemExit((self.home / "server.log").read_text())
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def look(self) -> dict[str, bool]:
        """What the page promises, seen from outside."""
        body = {"model": "example/names", "count": 2, "seed": 7}
        with httpx.stream("POST", f"{self.url}/v1/names", json=body) as answer:
            kind = answer.headers["content-type"]
            frames = [line for line in answer.iter_lines() if line.startswith("data: ")]
        refused = httpx.post(f"{self.url}/v1/names", json={**body, "count": 0})
        metrics = httpx.get(f"{self.url}/metrics").text
        cards = {card["name"]: card["status"] for card in httpx.get(f"{self.url}/v1/plugins").json()["data"]}
        listed = json.loads(self.call([str(self.bin / "polymux"), "plugins", "--json"]))
        installed = {each["name"]: each for each in listed}
        return {
            "answers and streams": kind.startswith("text/event-stream") and len(frames) > 3,
            "ends as told": frames[-1] == "data: [DONE]",
            "refuses by name": refused.status_code == 400 and refused.json()["error"]["param"] == "count",
            "is in /docs": "/v1/names" in httpx.get(f"{self.url}/docs").text,
            "is in /openapi.json": "/v1/names" in httpx.get(f"{self.url}/openapi.json").json()["paths"],
            "is counted": 'task="invent"' in metrics,
            "is listed": cards.get("example") == "enabled",
            "is found once installed": installed["example"]["status"] == "enabled",
        }

    def stop(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(60)


def all_packages() -> set[str]:
    """Folders that packages are installed in, of this environment and of those that it sees."""
    return {*site.getsitepackages(), *(path for path in sys.path if path.endswith("site-packages"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="take dependencies from this environment")
    parser.add_argument("--keep", action="store_true", help="append the figures to the ledger")
    parser.add_argument("--note", default="", help="beside the hardware in the ledger: a busy machine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polymux-tutorial-") as name:
        walk = Walk(Path(name), here=options.here)
        try:
            walk.install()
            walk.walk()
            seen = walk.look()
        finally:
            walk.stop()
    print(json.dumps({"seconds": walk.took, "seen": seen}, indent=1))
    if not all(seen.values()):
        raise SystemExit(1)
    if options.keep:
        hardware = ", ".join(part for part in (describe_cpu(), options.note) if part)
        for what, seconds in walk.took.items():
            if what != "environment" or not options.here:
                record("tutorial", f"{what}, without reading and typing", seconds, "s", hardware=hardware)


if __name__ == "__main__":
    main()
