"""Old tokenizer files -> tokenizer.json, beside links to the model's other files.

Run as a module it converts: `python -m polymux.core.models.convert.tokenizer FOLDER TARGET`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from polymux.core.models.convert.converter import Converter, run_module
from polymux.core.models.source import Report

OLD_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "merges.txt")


class TokenizerConverter(Converter):
    name = "tokenizer"
    version = 1

    def accepts(self, path: Path) -> bool:
        if not (path / "config.json").exists() or (path / "tokenizer.json").exists():
            return False
        return any((path / name).exists() for name in OLD_FILES)

    def convert(self, path: Path, folder: Path, report: Report) -> None:
        report(f"converting the tokenizer of {path.name} to tokenizer.json, once")
        run_module(__name__, path, folder)
        for original in path.iterdir():
            copy = folder / original.name
            if not copy.exists():
                copy.symlink_to(original.resolve())


def main(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
