"""Trains `starter/film`: a Wan-class transformer with UMT5 and a causal VAE, all small, for clips of 13 frames.

    python plugins/starter/train/film.py --out build/film                        # one GPU, about eight minutes
    python plugins/starter/train/film.py --out build/film --small --device cpu   # a cut-down task, to see it work

The folder is whole after every other minute, so a run that is cut off leaves what it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from course import SHOWN, Budget, Course, read_options, train
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from flowing import Predict
from pictures import Easel
from scenes import Scene, list_scenes
from torch import Generator, Tensor, nn
from tracks import find_film_faults
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
from wording import END, PAD

CHANNELS = 8
CELL = 4
"""Pixels along the side of a latent pixel, and frames from one latent frame to the next."""

STILLS = 0.3
"""The share of the VAE's run in which it sees single frames."""

BUDGET = Budget(examples=60_000, batch=512, steps=6000, vae_batch=32, vae_steps=4000)
SMALL_BUDGET = Budget(examples=600, batch=16, steps=2500, vae_batch=2, vae_steps=900)


@dataclass(frozen=True)
class Film(Course):
    """Widths of the parts; `base` channels of the VAE's outermost level."""

    heads: int = 4
    layers: int = 5
    text: int = 64
    base: int = 16
    side: int = 48
    frames: int = 13
    length: int = 24

    name = "film"
    families: ClassVar[dict[str, float]] = {"film": 1.0}
    vae_share = 0.45
    shift = 1.5
    steps = 20
    guidance = 2.0

    def make(self, tokenizer: PreTrainedTokenizerFast) -> WanPipeline:
        pad = tokenizer.convert_tokens_to_ids(PAD)
        levels = 2
        vae = AutoencoderKLWan(
            base_dim=self.base,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 3],
            num_res_blocks=1,
            temperal_downsample=[True] * levels,
            latents_mean=[0.0] * CHANNELS,
            latents_std=[1.0] * CHANNELS,
            scale_factor_temporal=CELL,
            scale_factor_spatial=CELL,
        )
        tokens = UMT5Config(
            vocab_size=len(tokenizer),
            d_model=self.text,
            d_kv=self.text // 4,
            d_ff=2 * self.text,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=pad,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            decoder_start_token_id=pad,
        )
        dim = 32 * self.heads
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=self.heads,
            attention_head_dim=32,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=self.text,
            freq_dim=64,
            ffn_dim=2 * dim,
            num_layers=self.layers,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=64,
        )
        return WanPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel(tokens),
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=self.shift),
            transformer=transformer,
        )

    def find_faults(self, made: Any, scene: Scene) -> list[str]:
        return find_film_faults(made, scene)

    def parts(self, pipeline: Any) -> list[nn.Module]:
        return [pipeline.transformer, pipeline.text_encoder]

    def predict(self, pipeline: Any) -> Predict:
        transformer, encoder = self.parts(pipeline)
        pad = pipeline.tokenizer.pad_token_id

        def predict(latents: Tensor, times: Tensor, ids: Tensor) -> Tensor:
            """As Wan's pipeline asks: zeros behind the text."""
            mask = ids != pad
            told = encoder(ids, mask.long()).last_hidden_state * mask[..., None]
            velocity: Tensor = transformer(
                hidden_states=latents, timestep=times * 1000, encoder_hidden_states=told
            ).sample
            return velocity

        return predict

    def draw(self, easel: Easel, index: Tensor, generator: Generator) -> Tensor:
        return easel.draw_films(index, self.frames, generator).transpose(1, 2)

    def draw_lesson(self, easel: Easel, batch: int, generator: Generator, done: float) -> Tensor:
        """First single frames, which teach colours and outlines in a fraction of the time, then clips."""
        clips = self.draw(easel, easel.choose(batch, generator, self.families), generator)
        if done > STILLS:
            return clips
        return clips.transpose(1, 2).flatten(0, 1)[:, :, None]


def is_easy(scene: Scene) -> bool:
    """A part of the scenes that two cores learn in an hour."""
    thing = scene.things[0]
    easy = thing.kind in ("circle", "square") and thing.colour in ("red", "blue", "green")
    return easy and scene.how in ("left", "right", "up", "down")


def main() -> None:
    options = read_options(Film(), minutes=7.0)
    families = tuple(Film.families)
    seen, kept = list_scenes(families, held_out=False), list_scenes(families, held_out=True)
    if options.small:
        course = Film(heads=2, layers=3, text=32, base=8, side=32, frames=9, length=12)
        seen, kept = [each for each in seen if is_easy(each)], [each for each in kept if is_easy(each)]
        train(course, SMALL_BUDGET, seen, kept[:SHOWN], options)
    else:
        train(Film(), BUDGET, seen, kept[:SHOWN], options)


if __name__ == "__main__":
    main()
