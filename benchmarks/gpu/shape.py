"""A model's folder with random weights of a real shape, as a server loads it: nothing has to be downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from shapes import build_model
from tokenizers import decoders, models

SHARD_BYTES = 4 << 30


def write_shape(shape: dict, folder: Path, device: str) -> None:
    """Configuration, bfloat16 weights in shards, and a tokenizer with a word for every id."""
    model = build_model(shape, device)
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    tied = model.config.tie_word_embeddings
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        size += tensor.nbytes
        if size > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    places = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in shard.items()}, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(model.config.vocab_size, folder)


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Byte-level, without merges: text comes apart into letters, and every id has a text of its own."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"Ġw{number}" for number in range(vocabulary - len(alphabet))]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
