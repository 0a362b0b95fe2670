"""What a killed process shared by name goes away; what a living one shares stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from polymux.core.engine.folder import PrivateFolder, sweep

OWNER = """
import sys
from pathlib import Path
from polymux.core.engine.folder import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1]))
(folder.path / "1").write_bytes(b"left behind")
print(folder.path, flush=True)
sys.stdin.read()
"""


def start_owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_killed_owner_is_swept_and_a_living_one_is_not(tmp_path: Path) -> None:
    killed, lost = start_owner(tmp_path)
    living, kept = start_owner(tmp_path)
    try:
        killed.kill()
        killed.wait()
        assert sweep(tmp_path) == [lost.name]
        assert not lost.exists()
        assert (kept / "1").read_bytes() == b"left behind"
    finally:
        living.communicate()


def test_a_folder_is_private_named_after_its_owner_and_removed_by_close(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.name.startswith(f"polymux-{os.getpid()}-")
    assert sweep(tmp_path) == []
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_sweeping_leaves_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "polymux-notes").mkdir()
    (tmp_path / "polymux-file").write_text("no folder")
    (tmp_path / "polymux-link").symlink_to(tmp_path / "polymux-notes")
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
