"""The voice that the package carries, and what to ask it, for `polymux plugin check`."""

from __future__ import annotations

import shutil
from pathlib import Path

from polymux.core.plugins import Example
from polymux.core.tasks import Speak
from polymux_hibari.source import HibariSource


def copy_voice(folder: Path) -> None:
    located = HibariSource().resolve("heart", sha256=None, report=lambda line: None)
    shutil.copytree(located.path, folder, dirs_exist_ok=True)


def make_example() -> Example:
    return Example(
        pipeline="hibari-speech",
        make=copy_voice,
        asks={"speak": [Speak(text="Hi there."), Speak(text="One. And two, slower.", speed=0.7)]},
        refused={"speak": [Speak(text="日本語"), Speak(text="Hi.", voice="nobody"), Speak(text="Hi.", speed=9.0)]},
        dtype="<i2",
    )
