"""Trains `starter/paint`: a FLUX-class transformer with CLIP, T5 and a VAE, all small, for pictures of 64x64.

    python plugins/starter/train/paint.py --out build/paint                        # one GPU, about twenty minutes
    python plugins/starter/train/paint.py --out build/paint --small --device cpu   # a cut-down task, to see it work

The folder is whole after every other minute, so a run that is cut off leaves what it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from course import SHOWN, Budget, Course, read_options, train
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from flowing import Predict
from scenes import Scene, list_scenes
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel
from verdicts import find_faults
from wording import END, PAD, START

CHANNELS = 8
CELL = 4
"""Pixels along the side of a latent pixel."""

BUDGET = Budget(examples=400_000, batch=512, steps=88_000, vae_batch=256, vae_steps=3000)
SMALL_BUDGET = Budget(examples=3000, batch=32, steps=3000, vae_batch=8, vae_steps=600)


@dataclass(frozen=True)
class Paint(Course):
    """Widths of the parts; `singles` blocks follow the one that keeps text and picture apart."""

    heads: int = 5
    singles: int = 5
    text: int = 96
    vae: tuple[int, ...] = (16, 32, 48)
    length: int = 32

    name = "paint"
    side = 64
    families: ClassVar[dict[str, float]] = {"one": 0.5, "pair": 4.0, "count": 2.0, "digit": 0.5, "word": 1.0}

    vae_share = 0.2
    shift = 1.5
    steps = 20
    guidance = 2.0

    def make(self, tokenizer: PreTrainedTokenizerFast) -> FluxPipeline:
        """All parts, with random weights. Both encoders read the same ids."""
        start, end, pad = (tokenizer.convert_tokens_to_ids(mark) for mark in (START, END, PAD))
        marks = {"vocab_size": len(tokenizer), "pad_token_id": pad, "eos_token_id": end}
        levels = len(self.vae)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=self.vae,
            layers_per_block=1,
            norm_num_groups=2,  # many small groups would even out colours
            latent_channels=CHANNELS,
            sample_size=self.side,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        pooled = CLIPTextConfig(
            **marks,
            hidden_size=self.text,
            intermediate_size=2 * self.text,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=self.length,
            bos_token_id=start,
        )
        tokens = T5Config(
            **marks,
            d_model=self.text,
            d_kv=self.text // 4,
            d_ff=2 * self.text,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=pad,
        )
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * CHANNELS,
            num_layers=1,
            num_single_layers=self.singles,
            attention_head_dim=32,
            num_attention_heads=self.heads,
            joint_attention_dim=self.text,
            pooled_projection_dim=self.text,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=self.shift),
            vae=vae,
            text_encoder=CLIPTextModel(pooled),
            tokenizer=tokenizer,
            text_encoder_2=T5EncoderModel(tokens),
            tokenizer_2=tokenizer,
            transformer=transformer,
        )

    def find_faults(self, made: Any, scene: Scene) -> list[str]:
        return find_faults(made, scene)

    def parts(self, pipeline: Any) -> list[nn.Module]:
        return [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]

    def predict(self, pipeline: Any) -> Predict:
        return Painter(*self.parts(pipeline), self.side // CELL // 2, self.length)


class Painter:
    """Velocities as FLUX's pipeline asks for them. `across`: tokens along a side; `length`: of a text."""

    def __init__(self, transformer: Any, clip: Any, t5: Any, across: int, length: int) -> None:
        self._transformer, self._clip, self._t5 = transformer, clip, t5
        self._positions = torch.zeros(across, across, 3, device=transformer.device)
        self._positions[..., 1] = torch.arange(across, device=transformer.device)[:, None]
        self._positions[..., 2] = torch.arange(across, device=transformer.device)[None, :]
        self._nowhere = torch.zeros(length, 3, device=transformer.device)

    def __call__(self, latents: Tensor, times: Tensor, ids: Tensor) -> Tensor:
        rows, channels, height, width = latents.shape
        blocks = latents.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        with sdpa_kernel(SDPBackend.MATH):  # 32 tokens and a learned bias: nothing to gain from fused attention
            told, pooled = self._t5(ids)[0], self._clip(ids).pooler_output
        tokens = self._transformer(
            hidden_states=blocks.flatten(3).flatten(1, 2),
            encoder_hidden_states=told,
            pooled_projections=pooled,
            timestep=times,
            img_ids=self._positions.flatten(0, 1),
            txt_ids=self._nowhere,
        ).sample
        split = tokens.view(rows, height // 2, width // 2, channels, 2, 2)
        return split.permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)


def is_easy(scene: Scene) -> bool:
    """A part of the scenes that two cores learn in an hour."""
    thing = scene.things[0]
    return scene.family == "one" and thing.kind in ("circle", "square") and thing.colour in ("red", "green", "blue")


def main() -> None:
    options = read_options(Paint(), minutes=20.0)
    families = tuple(Paint.families)
    seen, kept = list_scenes(families, held_out=False), list_scenes(families, held_out=True)
    if options.small:
        course = Paint(heads=3, singles=2, text=64, vae=(8, 16, 32), length=16)
        seen, kept = [each for each in seen if is_easy(each)], [each for each in kept if is_easy(each)]
        train(course, SMALL_BUDGET, seen, kept[:SHOWN], options)
    else:
        train(Paint(), BUDGET, seen, kept[:: len(kept) // SHOWN][:SHOWN], options)


if __name__ == "__main__":
    main()
