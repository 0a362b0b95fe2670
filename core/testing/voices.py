"""Tiny speech models with random weights: their architectures are real, their sound is noise."""

from __future__ import annotations

import torch
from transformers import CsmConfig, CsmForConditionalGeneration, DacConfig, DacModel, VitsConfig, VitsModel

from polymux.core.testing.tiny import VOCABULARY

_LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

CODEBOOKS = 4
CODES = 16
"""Of the tiny codec; three more ids are a codebook's special ones."""


def tiny_codec_config() -> dict[str, object]:
    """Mimi: 8 samples a frame of `CODEBOOKS` codes; its attention sees three positions."""
    return {
        "model_type": "mimi",
        "sampling_rate": 100,
        "frame_rate": 12.5,
        "hidden_size": 16,
        "num_filters": 4,
        "upsampling_ratios": [2, 2],
        "kernel_size": 3,
        "codebook_size": CODES,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "num_quantizers": CODEBOOKS,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 3,
        "upsample_groups": 16,
        "layer_scale_initial_scale": 0.5,
    }


def tiny_csm(context: int = 256, head_dim: int = 8) -> torch.nn.Module:
    """CSM: frames of `CODEBOOKS` codes from a backbone and a depth decoder, and the tiny Mimi."""
    shared = {"vocab_size": CODES + 3, "num_codebooks": CODEBOOKS, "head_dim": head_dim}
    layers = {**_LAYERS, **shared, "num_hidden_layers": 3, "max_position_embeddings": context}
    depth = {**_LAYERS, **shared, "backbone_hidden_size": 32, "max_position_embeddings": 33}
    config = CsmConfig(
        **layers,
        text_vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        codebook_pad_token_id=CODES + 2,
        codebook_eos_token_id=0,
        audio_token_id=VOCABULARY - 2,
        audio_eos_token_id=VOCABULARY - 1,
        tie_codebooks_embeddings=False,
        depth_decoder_config=depth,
        codec_config=tiny_codec_config(),
    )
    model = CsmForConditionalGeneration(config)
    for name, buffer in model.codec_model.named_buffers():
        if name.endswith("embed_sum"):
            buffer.normal_()  # a codebook that is not trained is all zeros
    return model


def tiny_dac() -> torch.nn.Module:
    """DAC: 8 samples a frame of three codes, convolutions that look both ways."""
    model = DacModel(
        DacConfig(
            encoder_hidden_size=4,
            hidden_size=8,
            decoder_hidden_size=16,
            downsampling_ratios=[2, 4],
            upsampling_ratios=[4, 2],
            n_codebooks=3,
            codebook_size=CODES,
            codebook_dim=4,
            sampling_rate=800,
        )
    )
    with torch.no_grad():
        for quantizer in model.quantizer.quantizers:
            quantizer.codebook.weight *= 300  # so that every frame is heard
    return model


SNAC = {
    "sampling_rate": 800,
    "encoder_dim": 4,
    "encoder_rates": [2, 3],
    "latent_dim": 16,
    "decoder_dim": 16,
    "decoder_rates": [3, 2],
    "attn_window_size": None,
    "codebook_size": CODES,
    "codebook_dim": 4,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
"""The configuration of a tiny one: 24 samples a frame of seven codes."""


def tiny_snac() -> torch.nn.Module:
    """The package `snac`'s model, as Orpheus speaks through it."""
    from snac import SNAC as Model

    model = Model(**SNAC)
    for quantizer in model.quantizer.quantizers:
        quantizer.codebook.weight.data *= 3
    return model


def tiny_vits(speakers: int = 1, *, stochastic: bool = True) -> torch.nn.Module:
    """VITS: 8 samples a frame."""
    return VitsModel(
        VitsConfig(
            vocab_size=30,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            flow_size=16,
            spectrogram_bins=9,
            prior_encoder_num_flows=2,
            prior_encoder_num_wavenet_layers=2,
            posterior_encoder_num_wavenet_layers=1,
            duration_predictor_num_flows=2,
            use_stochastic_duration_prediction=stochastic,
            upsample_initial_channel=16,
            upsample_rates=[4, 2],
            upsample_kernel_sizes=[8, 4],
            resblock_kernel_sizes=[3, 5],
            resblock_dilation_sizes=[[1, 3], [1, 3]],
            num_speakers=speakers,
            speaker_embedding_size=8 if speakers > 1 else 0,
            sampling_rate=1000,
        )
    )
