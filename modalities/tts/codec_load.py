"""Codec language models from their folders.

csm    transformers' CsmForConditionalGeneration, whose codec is in the same weights
flat   a plain causal language model that writes codec ids; its config.json says how, under `speech`:
       {"codec": "codec", "first": 1000, "codebooks": 3, "size": 1024, "end": 999, "voices": ["tara"],
        "template": "{voice}: {text}", "before": [], "after": []}
       where `codec` is a folder inside the model's, with a Mimi, DAC or SNAC model, and `codebooks` counts the codes
       of a frame (seven of SNAC's)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModel, CsmForConditionalGeneration

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.dtype import read_dtype
from polymux.core.compute.load import load_decoder
from polymux.core.engine.site import Site
from polymux.core.errors import ModelError
from polymux.core.tasks import Sampling
from polymux.modalities.tts.codec_program import CodecProgram
from polymux.modalities.tts.codecs import Codec, make_codec
from polymux.modalities.tts.csm import split_csm
from polymux.modalities.tts.frames import DeepFrames, FlatFrames, FlatSpan
from polymux.modalities.tts.snac import is_snac, load_snac

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

CSM_SAMPLING = {"temperature": 0.9, "top_k": 50}
"""The model authors' own."""

FLAT_SAMPLING = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


def load_csm(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> CodecProgram:
    """Raises `ModelError`."""
    try:
        model = CsmForConditionalGeneration.from_pretrained(files.folder, dtype=read_dtype(options))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load a CSM model from {files.folder}: {error}") from error
    return build_csm(model.to(site.device.torch), site, files.reference, options)


def build_csm(model: Any, site: Site, reference: str, options: Mapping[str, Any]) -> CodecProgram:
    """The program around a transformers `CsmForConditionalGeneration`, which belongs to it from now on."""
    sampling = read_sampling(options, CSM_SAMPLING)
    decoder = split_csm(model, tier=options.get("tier", "fast"), top_k=sampling.top_k)
    codec = make_codec(model.codec_model.float())  # half the bits of a codec are heard as noise
    return build(
        TokenStage("frames", decoder, site), codec, DeepFrames(model.config.num_codebooks), site, reference, sampling
    )


def load_flat(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> CodecProgram:
    """Raises `ModelError`."""
    speech = files.config()["speech"]
    device, dtype = site.device.torch, read_dtype(options)
    try:
        codec = load_codec(files.folder / speech["codec"], device)
        span = FlatSpan(speech["first"], speech["codebooks"], speech["size"], speech["end"])
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelError(f"cannot load a codec from {files.folder}: {error!r}") from error
    if span.codebooks not in codec.codebooks or span.size > codec.size:
        raise ModelError(
            f"{files.reference}: frames of {span.codebooks} codes below {span.size} do not fit the codec, which has "
            f"{codec.codebooks[-1]} below {codec.size}"
        )
    decoder = load_decoder(
        files.folder,
        device,
        dtype,
        tier=options.get("tier", "fast"),
        quantization=options.get("quantization"),
    )
    stage = TokenStage("codes", decoder, site)
    sampling = read_sampling(options, FLAT_SAMPLING)
    return build(stage, codec, FlatFrames(span), site, files.reference, sampling)


def load_codec(folder: Path, device: torch.device) -> Codec:
    """A folder of transformers' or of the package `snac`. Raises `ModelError`, and what reading a folder raises."""
    config = json.loads((folder / "config.json").read_text())
    if is_snac(config):
        return load_snac(folder, device)
    return make_codec(AutoModel.from_pretrained(folder).to(device))


def build(
    decoder: TokenStage,
    codec: Codec,
    layout: DeepFrames | FlatFrames,
    site: Site,
    reference: str,
    sampling: Sampling,
) -> CodecProgram:
    # on a CPU a window fills every core by itself, and other stages get their turn between two
    together = 1 if site.device.torch.type == "cpu" else 64 * (codec.left + 64)
    vocoder = OneShotStage("vocode", codec, site, max_units=together, to_host=True)
    return CodecProgram(decoder, vocoder, layout, site, reference, sampling)


def read_sampling(options: Mapping[str, Any], usual: Mapping[str, Any]) -> Sampling:
    """The options' temperature, top_k and so on where they say some, else the usual."""
    given = {name: options[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty") if name in options}
    return Sampling(**{**usual, **given})
