"""A tiny recogniser with random weights, for the check and for tests."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from polymux.core.plugins import Example
from polymux.core.tasks import Transcribe
from polymux.core.testing.media import write_wav
from polymux_ctc.work import RATE, Words

PIECES = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz"]


def write_model(folder: Path) -> None:
    torch.manual_seed(5)
    config = Wav2Vec2Config(
        vocab_size=len(PIECES),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 4, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        pad_token_id=0,
    )
    model = Wav2Vec2ForCTC(config).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=1.5)
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({piece: id for id, piece in enumerate(PIECES)}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"do_normalize": True, "sampling_rate": RATE}))


def make_recording(seconds: float, seed: int) -> bytes:
    """Noise that swells and falls."""
    samples = np.random.default_rng(seed).normal(0, 0.2, int(seconds * RATE))
    return write_wav((samples * np.abs(np.sin(np.arange(len(samples)) / 2000))).astype(np.float32), RATE)


def make_example() -> Example:
    folder = Path(tempfile.mkdtemp(prefix="polymux-ctc-"))
    files = []
    for number, seconds in enumerate((0.8, 1.3)):
        files.append(folder / f"{number}.wav")
        files[-1].write_bytes(make_recording(seconds, number))
    broken = folder / "broken.wav"
    broken.write_bytes(b"this is no sound")
    return Example(
        pipeline="ctc",
        make=write_model,
        asks={
            "words": [Words(str(file)) for file in files],
            "transcribe": [Transcribe(audio=files[0].read_bytes())],
        },
        refused={
            "words": [Words(str(broken))],
            "transcribe": [Transcribe(audio=b"no sound"), Transcribe(audio=files[0].read_bytes(), prompt="Names")],
        },
        tolerance=1e-3,
    )
