"""What `see` and `look` have in common: a small vision transformer, and how it learns what is where in a picture.

For every patch the encoder is asked which kind of thing covers it, and in which colour. That is many answers a picture,
so it learns in a fraction of the time that captions alone would take; the two heads are thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loop import read_arguments, train
from pictures import Easel, Layout
from safetensors.torch import load_file, save_file
from scenes import COLOURS, KINDS, STILL, list_scenes
from torch import Generator, Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionConfig, SmolVLMVisionTransformer

EYE = "eye.safetensors"
PATCH = 8
MEAN = DEVIATION = 0.5
EMPTY_WEIGHT = 0.2
"""Of a patch that shows nothing, beside one that shows something."""
NOISE, BLURRED = 0.03, 0.6


@dataclass(frozen=True)
class Size:
    """How large the encoder is, and which scenes it is shown."""

    side: int
    hidden: int
    layers: int
    families: tuple[str, ...]

    @property
    def cells(self) -> int:
        """Patches of a side."""
        return self.side // PATCH

    @property
    def tower(self) -> dict[str, Any]:
        """The `vision_config`. `initializer_range` is about what keeps variance through layers as narrow as these."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32,
            "image_size": self.side,
            "patch_size": PATCH,
            "initializer_range": 0.08,
        }


WHOLE = Size(64, 128, 5, STILL)
SMALL = Size(48, 96, 3, ("one",))
"""What a processor learns in minutes: that a recipe is right, not a model to serve."""

PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [MEAN] * 3,
    "image_std": [DEVIATION] * 3,
    "do_resize": True,
}


def see(vision: nn.Module, pixels: Tensor) -> Tensor:
    """(batch, 3, side, side) to (batch, patches, hidden), for the vision towers of SigLIP and SmolVLM alike: their own
    modules, without what they do for pictures of other sizes."""
    parts: Any = vision
    patches = parts.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
    hidden = patches + parts.embeddings.position_embedding.weight
    return parts.post_layernorm(parts.encoder(inputs_embeds=hidden).last_hidden_state)


def scale(pictures: Tensor) -> Tensor:
    """Pictures from 0 to 1, in steps of a byte as they will be served, to what the encoder takes."""
    return ((pictures * 255).round() / 255 - MEAN) / DEVIATION


def roughen(pictures: Tensor, generator: Generator) -> Tensor:
    """Half of the pictures a little blurred, half with a little noise: not every picture is drawn by this project."""
    shape, device = (len(pictures), 1, 1, 1), pictures.device
    chances = torch.rand(4, *shape, generator=generator, device=device)
    soft = avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    pictures = torch.lerp(pictures, soft, chances[0] * BLURRED * (chances[1] < 0.5))
    noise = torch.randn(pictures.shape, generator=generator, device=device)
    return (pictures + noise * NOISE * chances[2] * (chances[3] < 0.5)).clamp(0, 1)


class Witness(nn.Module):
    """Asks an encoder's vectors what they show."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.cells = size.cells
        self.kind = nn.Linear(size.hidden, len(KINDS) + 1)
        self.colour = nn.Linear(size.hidden, len(COLOURS) + 1)

    def forward(self, patches: Tensor, easel: Easel, layout: Layout) -> Tensor:
        """The loss, a scalar."""
        loss = patches.new_zeros((), dtype=torch.float32)
        for head, marks in zip((self.kind, self.colour), easel.mark(layout, self.cells), strict=True):
            told = head(patches).flatten(0, 1).float()
            weight = torch.ones(told.shape[1], device=told.device)
            weight[-1] = EMPTY_WEIGHT
            loss = loss + cross_entropy(told, marks.flatten(), weight)
        return loss


def make_tower(size: Size) -> nn.Module:
    """The encoder with random weights, as SmolVLM has it."""
    return SmolVLMVisionTransformer(SmolVLMVisionConfig(**size.tower))


def load_eye(vision: nn.Module, path: Path | None) -> None:
    """Gives a vision tower what an eye has learnt; its head, where it has one, is left as it is. Raises `ValueError`
    for an eye of another size or build."""
    if path is None:
        return
    learnt = load_file(path)
    own = {name: each.shape for name, each in vision.state_dict().items() if not name.startswith("head.")}
    if own != {name: each.shape for name, each in learnt.items()}:
        raise ValueError(f"{path} is not an eye for this tower")
    vision.load_state_dict(learnt, strict=False)


def main() -> None:
    wanted = read_arguments(__doc__, steps=2000, batch=1024, rate=1e-3, small=(600, 64))
    size = SMALL if wanted.small else WHOLE
    easel = Easel(list_scenes(size.families, held_out=False), size.side, wanted.device)
    eye, witness = make_tower(size).to(wanted.device), Witness(size).to(wanted.device)

    def lose(generator: Generator) -> tuple[Tensor, dict[str, Tensor]]:
        layout = easel.lay(easel.choose(wanted.batch, generator), generator)
        pixels = scale(roughen(easel.draw(layout), generator))
        return witness(see(eye, pixels), easel, layout), {}

    if train(nn.ModuleList([eye, witness]), lose, wanted):
        save_file(eye.state_dict(), wanted.out / EYE)


if __name__ == "__main__":
    main()
