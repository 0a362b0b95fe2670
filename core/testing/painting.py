"""A tiny FLUX model as a diffusers folder, every part with random weights, for tests from the files to the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from polymux.core.testing.denoising import CHANNELS, JOINT, POOLED, flow_scheduler, tiny_flux
from polymux.core.testing.tokenizers import wordpiece

CLIP_TOKENS = 77


def tiny_clip_tokenizer(folder: Path) -> CLIPTokenizer:
    """CLIP's tokenizer with bytes, three merges and the two marks for a vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e</w>", "f o"]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *(merge.replace(" ", "") for merge in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary, rules = folder / "vocab.json", folder / "merges.txt"
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.write_text(json.dumps({piece: id for id, piece in enumerate(pieces)}))
    rules.write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=CLIP_TOKENS)


def save_tiny_flux(folder: Path) -> FluxPipeline:
    """Saves the model into `folder`, as diffusers does, and returns diffusers' own pipeline over it."""
    torch.manual_seed(5)
    clip = tiny_clip_tokenizer(folder / "tokenizer")
    sizes: dict[str, Any] = {"hidden_size": POOLED, "num_attention_heads": 2, "intermediate_size": 16}
    end = clip.convert_tokens_to_ids("<|endoftext|>")
    pooled = CLIPTextConfig(
        **sizes, vocab_size=len(clip), num_hidden_layers=2, bos_token_id=end - 1, eos_token_id=end, pad_token_id=end
    )
    tokens = T5Config(vocab_size=200, d_model=JOINT, d_kv=6, d_ff=16, num_layers=2, num_heads=2)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )
    pipeline = FluxPipeline(
        scheduler=flow_scheduler(),
        vae=vae.eval(),
        text_encoder=CLIPTextModel(pooled).eval(),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(tokens).eval(),
        tokenizer_2=PreTrainedTokenizerFast(
            tokenizer_object=wordpiece(), pad_token="[PAD]", unk_token="[UNK]", model_max_length=512
        ),
        transformer=tiny_flux(),
    )
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
