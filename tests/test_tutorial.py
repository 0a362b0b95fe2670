"""The tutorial is walked word by word in an environment of its own: what it promises is seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_new_modality_answers_streams_is_documented_counted_and_passes_the_check() -> None:
    command = [sys.executable, "benchmarks/tutorial.py", "--here"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert len(told["seen"]) == 8 and all(told["seen"].values()), told
    assert told["seconds"]["the whole page"] > 0
