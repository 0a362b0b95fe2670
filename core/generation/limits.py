"""How much a model reads and how wide its vectors are, from its small files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polymux.core.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
"""What families of models call their longest sequence."""

WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
"""What families of models call the size of their hidden states."""

MAX_INPUTS = 2048
"""Inputs of one request to embed or rank, and branches (prompts times n) of one generation."""

UNKNOWN = 10**9
"""tokenizer_config.json writes an astronomical number when it does not know."""


def read_context(files: ModelFiles) -> int:
    """Tokens of prompt and answer together. Raises `ModelError` when config.json does not say."""
    return read_number(files, LENGTHS)


def read_longest_input(files: ModelFiles) -> int:
    """Tokens of one text to embed, special ones included: what its authors trained for, if they say so."""
    published = files.json("sentence_bert_config.json").get("max_seq_length")
    if isinstance(published, int):
        return published
    lengths = [files.json("tokenizer_config.json").get("model_max_length"), read_context(files)]
    return min(int(length) for length in lengths if isinstance(length, int | float) and length < UNKNOWN)


def read_width(files: ModelFiles) -> int:
    """Dimensions of one embedding. Raises `ModelError` when config.json does not say."""
    return read_number(files, WIDTHS)


def read_number(files: ModelFiles, names: tuple[str, ...]) -> int:
    config: dict[str, Any] = files.config()
    for part in (config, config.get("text_config") or {}):
        for name in names:
            if isinstance(part.get(name), int):
                return part[name]
    raise ModelError(f"{files.reference}: config.json says none of {', '.join(names)}")


def check_ids(ids: list[int], vocabulary: int, where: str, param: str) -> list[int]:
    """The ids as they are. Raises `InvalidRequest` naming the first position that is no token of the model."""
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return ids
    position, wrong = next((i, id) for i, id in enumerate(ids) if not 0 <= id < vocabulary)
    raise InvalidRequest(
        f"{where}[{position}] is {wrong}: this model's token ids are 0 to {vocabulary - 1}.", param=param
    )
