"""Tiny models with random weights, one per family, for tests that need a real architecture and no download."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY = 97

IMAGE = VOCABULARY - 1
"""What holds the places of pictures; clips have the id before."""


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
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=_LAYERS | _TEXT | {"model_type": "llama"},
            vision_config=_LAYERS | {"image_size": 32, "patch_size": 4},
            scale_factor=2,
            image_token_id=IMAGE,
        )
    )


def tiny_smolvlm() -> torch.nn.Module:
    """SmolVLM: as Idefics3."""
    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            text_config=_LAYERS | _TEXT | {"model_type": "llama"},
            vision_config=_LAYERS | {"image_size": 32, "patch_size": 4},
            scale_factor=2,
            image_token_id=IMAGE,
        )
    )


def tiny_llava() -> torch.nn.Module:
    """LLaVA: a picture of 16 by 16 pixels becomes 16 vectors, of the last layer but one."""
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=_LAYERS | _TEXT | {"model_type": "llama"},
            vision_config=_LAYERS | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
            image_token_index=IMAGE,
        )
    )


def tiny_onevision() -> torch.nn.Module:
    """LLaVA-OneVision: tiles of 16 by 16 pixels, up to three by three of them in one picture."""
    sides = (16, 32, 48)
    return LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            text_config=_LAYERS | _TEXT | {"model_type": "qwen2"},
            vision_config=_LAYERS | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4},
            image_grid_pinpoints=[[height, width] for height in sides for width in sides],
            vision_aspect_ratio="anyres_max_4",
            image_token_index=IMAGE,
            video_token_index=IMAGE - 1,
        )
    )


_GRID = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 3, "num_heads": 4}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}


def tiny_qwen25vl() -> torch.nn.Module:
    """Qwen2.5-VL: pictures of any multiple of 8 pixels; windows of 16 pixels in all layers but one."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "window_size": 16}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=_LAYERS | _TEXT | {"rope_parameters": _MROPE},
            vision_config=_GRID | vision | {"fullatt_block_indexes": [1]},
            image_token_id=IMAGE,
            video_token_id=IMAGE - 1,
        )
    )


def tiny_qwen3vl() -> torch.nn.Module:
    """Qwen3-VL: pictures of any multiple of 8 pixels, whose inner layers also reach the decoder's first."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 36}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=_LAYERS | _TEXT | {"num_hidden_layers": 3, "head_dim": 8, "rope_parameters": _MROPE},
            vision_config=_GRID | vision | {"deepstack_visual_indexes": [0, 1]},
            image_token_id=IMAGE,
            video_token_id=IMAGE - 1,
        )
    )


_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0}

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


def bring(model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The model on a device, one that is only imagined too (`core.testing.imagined`); weights that are shared stay so.
    `dtype`: of its floating numbers."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in moved:
                    kind = dtype if tensor.is_floating_point() and dtype is not None else tensor.dtype
                    moved[tensor] = tensor.detach().to(device, kind)
                here = moved[tensor]
                tensors[name] = torch.nn.Parameter(here, requires_grad=False) if tensors is module._parameters else here
    return model.eval()
