"""GGUF -> safetensors in float32, through transformers' own reader (weights, config, tokenizer, chat template).

Run as a module it converts: `python -m polymux.core.models.convert.gguf FILE FOLDER`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from polymux.core.errors import ModelError
from polymux.core.models.convert.converter import Converter, run_module
from polymux.core.models.source import Report


class GgufConverter(Converter):
    name = "gguf"
    version = 1

    def accepts(self, path: Path) -> bool:
        return path.is_file() and path.suffix == ".gguf"

    def convert(self, path: Path, folder: Path, report: Report) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"{path.name} needs the gguf package: pip install 'polymux[gguf]'")
        report(f"converting {path.name} to safetensors, once (about half a minute for 135M parameters)")
        run_module(__name__, path, folder)


def main(source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, name = str(source.parent), source.name
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    # the weights are plain now; transformers would refuse to save, and others to load, under the old label
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    weights = {tensor.data_ptr(): (key, tensor) for key, tensor in reversed(model.state_dict().items())}
    save_file(dict(weights.values()), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
