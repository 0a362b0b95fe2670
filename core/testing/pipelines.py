"""Tiny models of every kind of diffusers pipeline that is served, as folders with random weights.

`save_tiny(kind, folder)` writes the folder as diffusers does, and returns diffusers' own pipeline over it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from polymux.core.testing.painting import tiny_clip_tokenizer
from polymux.core.testing.tokenizers import wordpiece

DIM = 16


def save_tiny(kind: str, folder: Path) -> Any:
    torch.manual_seed(11)
    pipeline = BUILDERS[kind](folder)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _words(length: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=wordpiece(), pad_token="[PAD]", unk_token="[UNK]", model_max_length=length
    )


def _clip(folder: Path, name: str, *, projected: bool) -> tuple[Any, Any]:
    tokenizer = tiny_clip_tokenizer(folder / name)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = transformers.CLIPTextConfig(
        hidden_size=DIM,
        num_attention_heads=2,
        intermediate_size=16,
        projection_dim=DIM,
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        bos_token_id=end - 1,
        eos_token_id=end,
        pad_token_id=end,
    )
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return tokenizer, kind(config)


def _t5(dim: int = 2 * DIM) -> Any:
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=200, d_model=dim, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    )


def _vae(**options: Any) -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.5,
        **options,
    )


def _loud(model: Any, spread: float = 0.25) -> Any:
    """Weights large enough that timestep, guidance and text all matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, spread)
    return model


def _flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def _sd3(folder: Path) -> Any:
    first, one = _clip(folder, "tokenizer", projected=True)
    second, two = _clip(folder, "tokenizer_2", projected=True)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * DIM,
        caption_projection_dim=16,
        pooled_projection_dim=2 * DIM,
        pos_embed_max_size=32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=_loud(transformer),
        scheduler=_flow(),
        vae=_vae(shift_factor=0.1),
        text_encoder=one,
        tokenizer=first,
        text_encoder_2=two,
        tokenizer_2=second,
        text_encoder_3=_t5(),
        tokenizer_3=_words(256),
    )


def tiny_unet(kind: str) -> Any:
    """Of the kind `sd` or `sdxl`."""
    if kind == "sd":
        return _unet(
            DIM,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
    return _unet(
        2 * DIM,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=DIM + 6 * 4,
    )


def _unet(cross: int, **options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=2,
        norm_num_groups=4,
        cross_attention_dim=cross,
        attention_head_dim=4,
        **options,
    )


def _sd(folder: Path) -> Any:
    tokenizer, encoder = _clip(folder, "tokenizer", projected=False)
    return diffusers.StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=tiny_unet("sd"),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl(folder: Path) -> Any:
    first, one = _clip(folder, "tokenizer", projected=False)
    second, two = _clip(folder, "tokenizer_2", projected=True)
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=one,
        text_encoder_2=two,
        tokenizer=first,
        tokenizer_2=second,
        unet=tiny_unet("sdxl"),
        scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )


def _pixart(folder: Path) -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=3,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        cross_attention_dim=16,
        caption_channels=2 * DIM,
        out_channels=8,
        use_additional_conditions=False,
    )
    return diffusers.PixArtSigmaPipeline(
        tokenizer=_words(300),
        text_encoder=_t5(),
        vae=_vae(),
        transformer=_loud(transformer),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )


def _qwen(folder: Path) -> Any:
    text = {
        "vocab_size": 200,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        "rope_theta": 1e6,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    }
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=1, video_token_id=2)
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    )
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        vae=vae,
        text_encoder=encoder,
        tokenizer=_words(2048),
        transformer=_loud(transformer),
    )


def tiny_wan(channels: int, **options: Any) -> Any:
    """A transformer for clips of so many input channels."""
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=4,
        text_dim=2 * DIM,
        freq_dim=16,
        ffn_dim=24,
        num_layers=3,
        rope_max_seq_len=32,
        **options,
    )
    return _loud(transformer, 0.15)


def _wan_parts(channels: int, **options: Any) -> dict[str, Any]:
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    )
    encoder = transformers.UMT5EncoderModel(
        transformers.UMT5Config(vocab_size=200, d_model=2 * DIM, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    )
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    return {
        "tokenizer": _words(512),
        "text_encoder": encoder,
        "vae": vae,
        "scheduler": scheduler,
        "transformer": tiny_wan(channels, **options),
    }


def _wan(folder: Path) -> Any:
    return diffusers.WanPipeline(**_wan_parts(4))


def _wan_two(folder: Path) -> Any:
    """Two experts, as Wan 2.2."""
    parts = _wan_parts(4)
    second = _loud(type(parts["transformer"]).from_config(parts["transformer"].config), 0.15)
    return diffusers.WanPipeline(**parts, transformer_2=second, boundary_ratio=0.8)


def _wan_start(folder: Path) -> Any:
    parts = _wan_parts(12, image_dim=16, added_kv_proj_dim=24)
    eye = transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
            projection_dim=16,
        )
    )
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return diffusers.WanImageToVideoPipeline(**parts, image_encoder=eye, image_processor=processor)


BUILDERS: dict[str, Callable[[Path], Any]] = {
    "sd3": _sd3,
    "sd": _sd,
    "sdxl": _sdxl,
    "pixart": _pixart,
    "qwen": _qwen,
    "wan": _wan,
    "wan, two experts": _wan_two,
    "wan, from a picture": _wan_start,
}
