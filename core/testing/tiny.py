"""Tiny models with random weights, one per family, for tests that need a real architecture and no download."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    BertConfig,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY = 97


def tiny_llama(vocabulary: int = VOCABULARY, context: int = 512) -> torch.nn.Module:
    """Llama: grouped heads, untied head."""
    sizes = {**_DECODER, "vocab_size": vocabulary, "max_position_embeddings": context}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))


def tiny_qwen3() -> torch.nn.Module:
    """Qwen3: norms on queries and keys, a head size of its own."""
    return Qwen3ForCausalLM(Qwen3Config(**_DECODER, head_dim=16))


def tiny_gemma3() -> torch.nn.Module:
    """Gemma 3: sliding and full layers with rotary bases of their own."""
    config = Gemma3TextConfig(
        **_DECODER, tie_word_embeddings=False, head_dim=16, sliding_window=8, query_pre_attn_scalar=16
    )
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(config)


def tiny_bert() -> torch.nn.Module:
    """BERT: bidirectional, learned positions."""
    return BertModel(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    )


def tiny_whisper() -> torch.nn.Module:
    """Whisper with three languages and windows of one second.

    Text is 0 to 79; then <|endoftext|> 80, <|startoftranscript|> 81, languages 82 to 84, <|translate|> 85,
    <|transcribe|> 86, <|startofprev|> 87, <|nospeech|> 88, <|notimestamps|> 89, <|0.00|> 90 to <|1.00|> 140.
    """
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=141,
            num_mel_bins=80,
            d_model=32,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=50,
            max_target_positions=64,
            eos_token_id=80,
            bos_token_id=80,
            pad_token_id=80,
            decoder_start_token_id=81,
        )
    )


def tiny_idefics() -> torch.nn.Module:
    """Idefics3: tiles of 32 by 32 pixels become 16 vectors each; the last id of the vocabulary holds their places."""
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=layers | text | {"pad_token_id": 0},
            vision_config=layers | {"image_size": 32, "patch_size": 4},
            scale_factor=2,
            image_token_id=VOCABULARY - 1,
        )
    )


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

DECODERS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "gemma3": tiny_gemma3,
}


def build(make: Callable[[], torch.nn.Module], seed: int = 0) -> torch.nn.Module:
    """The model with weights drawn from `seed`, large enough that its greedy tokens vary."""
    torch.manual_seed(seed)
    model = make().eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.35 if "embed" not in name else 1.0)
    return model
