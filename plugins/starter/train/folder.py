"""Writes a trained model as the folder that its ecosystem knows: half precision, tokenizer, processor, and what the
training was."""

from __future__ import annotations

import copy
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from loop import Wanted
from tokenizers import Tokenizer
from torch import nn

CARDS = Path(__file__).parent / "cards"


def write_folder(
    name: str,
    wanted: Wanted,
    model: Any,
    tokenizer: Tokenizer,
    processor: dict[str, Any],
    *,
    end: str,
    pad: str,
    template: str | None = None,
    texts: dict[str, Any] | None = None,
) -> Path:
    """The folder `model` in the run's own, with the card `cards/NAME.md`. `end` and `pad`: tokens of the tokenizer;
    `texts`: what else `tokenizer_config.json` says, so that texts are read as they were in training."""
    folder = wanted.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).half().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": pad, **(texts or {})}
    write_json(folder / "tokenizer_config.json", told)
    write_json(folder / "preprocessor_config.json", processor)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    run = describe_run(wanted, model)
    write_json(folder / "training.json", run)
    card = (CARDS / f"{name}.md").read_text()
    (folder / "README.md").write_text(card.replace("TRAINING", tell_run(run)))
    return folder


def tell_run(run: dict[str, Any]) -> str:
    """The run as the rows of a table."""
    told = {key: value for key, value in run.items() if not isinstance(value, dict)}
    told |= {f"{when} {key}": value for when in ("first", "last") for key, value in run[when].items()}
    return "\n".join(f"| {key} | {value} |" for key, value in told.items())


def describe_run(wanted: Wanted, model: nn.Module) -> dict[str, Any]:
    """What the model card says of the run, read from its log."""
    log = [json.loads(line) for line in (wanted.out / "log.jsonl").read_text().splitlines()]
    card = torch.cuda.get_device_name() if wanted.device.type == "cuda" else name_processor()
    return {
        "date": datetime.date.today().isoformat(),
        "device": card,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(each.numel() for each in model.parameters()),
        "small": wanted.small,
        "seed": wanted.seed,
        "steps": wanted.steps,
        "batch": wanted.batch,
        "rate": wanted.rate,
        "minutes": round(log[-1]["seconds"] / 60, 1),
        "first": log[0],
        "last": log[-1],
    }


def name_processor() -> str:
    """As Linux calls it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} thread"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
