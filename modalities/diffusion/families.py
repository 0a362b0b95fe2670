"""The engine's half of each kind of pipeline: its parts in memory, and what one picture's request is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import CLIPImageProcessor

from polymux.core.batch.denoiser import DenoiseModel
from polymux.core.errors import ModelError
from polymux.modalities.diffusion import encoders, flux, pixart, qwen, sd3, unet, wan
from polymux.modalities.diffusion.encoders import TextEncoders
from polymux.modalities.diffusion.pixels import LatentDecoder, LatentEncoder, StartEncoder
from polymux.modalities.diffusion.schedules import check_scheduler
from polymux.modalities.diffusion.work import PaintWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

LIBRARIES = ("diffusers", "transformers")
"""Where a part's class may come from."""


class Parts:
    """A folder's models, by the classes that its index names."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, device: torch.device) -> None:
        self.files = files
        self.index = files.json("model_index.json")
        self.dtype = dtype
        self._device = device
        self.loaded: dict[str, torch.nn.Module] = {}
        """Those that were asked for, by name."""

    def has(self, name: str) -> bool:
        named = self.index.get(name)
        return isinstance(named, list) and None not in named

    def load(self, name: str, dtype: torch.dtype | None = None) -> Any:
        """Raises `ModelError` when the index names no such part, one of another library, or one without its files."""
        kind = self._find(name)
        place = {"torch_dtype": dtype or self.dtype, "use_safetensors": True}
        try:
            part = kind.from_pretrained(self.files.path(name), **place)
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{self.files.reference}: its {name} cannot be loaded: {error}") from error
        self.loaded[name] = part.to(self._device).eval().requires_grad_(False)
        return part

    def adaptable(self) -> dict[str, torch.nn.Module]:
        """Those of the loaded parts that adapters may change: denoisers and text encoders."""
        kinds = ("transformer", "unet", "text_encoder")
        return {name: part for name, part in self.loaded.items() if name.startswith(kinds)}

    def scheduler(self) -> Any:
        scheduler = self._find("scheduler").from_pretrained(self.files.path("scheduler"))
        check_scheduler(scheduler)
        return scheduler

    def _find(self, name: str) -> Any:
        if not self.has(name):
            raise ModelError(f"{self.files.reference} has no {name} in its model_index.json")
        library, kind = self.index[name]
        if library not in LIBRARIES:
            raise ModelError(f"{self.files.reference} wants its {name} from {library!r}: only {LIBRARIES} are known")
        module = __import__(library)
        if not hasattr(module, kind):
            raise ModelError(f"{library} has no {kind}, which {self.files.reference} names as its {name}")
        return getattr(module, kind)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One loaded model, whatever its kind."""

    texts: TextEncoders
    denoiser: DenoiseModel
    decoder: LatentDecoder
    scheduler: Any
    channels: int
    """Of a latent."""
    scale: int
    """Pixels along the side of one latent pixel."""
    patch: int
    """Latent pixels along the side of one token."""
    apart: int = 0
    """Frames from one latent frame to the next; 0: pictures have no time axis."""
    linear: bool = False
    """The schedule falls evenly, see `schedules.make_schedule`."""
    extra: Callable[[PaintWork, torch.device], Mapping[str, Tensor]] = lambda work, device: {}
    """Conditions of every branch beside the text's."""
    source: LatentEncoder
    """Of the picture that a request starts from."""

    def shape(self, work: PaintWork) -> tuple[int, ...]:
        """Of a picture's latent."""
        sides = (work.height // self.scale, work.width // self.scale)
        if not self.apart:
            return (self.channels, *sides)
        return (self.channels, (work.frames - 1) // self.apart + 1, *sides)

    def tokens(self, shape: tuple[int, ...]) -> int:
        """Of one frame."""
        return (shape[-2] // self.patch) * (shape[-1] // self.patch)


def load_family(kind: str, parts: Parts) -> Family:
    """Raises `ModelError` when a part is missing or of an unknown kind."""
    return LOADERS[kind](parts)


def _levels(vae: Any) -> int:
    return 2 ** (len(vae.config.block_out_channels) - 1)


def _flux(parts: Parts) -> Family:
    vae = parts.load("vae")
    decoder = LatentDecoder(vae)
    return Family(
        texts=encoders.FluxTexts([parts.load("text_encoder"), parts.load("text_encoder_2")]),
        denoiser=flux.FluxDenoiser(parts.load("transformer")),
        decoder=decoder,
        source=LatentEncoder(decoder),
        scheduler=parts.scheduler(),
        channels=vae.config.latent_channels,
        scale=_levels(vae),
        patch=2,
        linear=True,
        extra=lambda work, device: {
            flux.GUIDANCE: torch.tensor(work.guidance, dtype=torch.float32).to(device, non_blocking=True)
        },
    )


def _sd3(parts: Parts) -> Family:
    vae, transformer = parts.load("vae"), parts.load("transformer")
    names = [name for name in ("text_encoder", "text_encoder_2", "text_encoder_3") if parts.has(name)]
    texts = [parts.load(name) for name in names]
    decoder = LatentDecoder(vae)
    return Family(
        texts=encoders.StableDiffusion3Texts(texts, transformer.config.joint_attention_dim),
        denoiser=sd3.StableDiffusion3Denoiser(transformer),
        decoder=decoder,
        source=LatentEncoder(decoder),
        scheduler=parts.scheduler(),
        channels=vae.config.latent_channels,
        scale=_levels(vae),
        patch=transformer.config.patch_size,
    )


def _sd(parts: Parts) -> Family:
    vae, model = parts.load("vae"), parts.load("unet")
    decoder = LatentDecoder(vae)
    return Family(
        texts=encoders.StableDiffusionTexts([parts.load("text_encoder")]),
        denoiser=unet.UNetDenoiser(model),
        decoder=decoder,
        source=LatentEncoder(decoder),
        scheduler=_mend(parts.scheduler()),
        channels=vae.config.latent_channels,
        scale=_levels(vae),
        patch=1,
    )


def _mend(scheduler: Any) -> Any:
    """Old folders leave out two settings that every pipeline of their kind corrects."""
    wanted = {"steps_offset": 1, "clip_sample": False}
    return type(scheduler).from_config(
        {**scheduler.config, **{key: wanted[key] for key in wanted if key in scheduler.config}}
    )


def _sdxl(parts: Parts) -> Family:
    vae, model = parts.load("vae"), parts.load("unet")
    texts = [parts.load("text_encoder"), parts.load("text_encoder_2")]

    def extra(work: PaintWork, device: torch.device) -> Mapping[str, Tensor]:
        size = (work.height, work.width)
        return {unet.SIZES: torch.tensor([*size, 0, 0, *size], dtype=torch.float32).to(device)}

    decoder = LatentDecoder(vae)
    return Family(
        texts=encoders.StableDiffusionXLTexts(texts, bool(parts.index.get("force_zeros_for_empty_prompt", True))),
        denoiser=unet.UNetDenoiser(model),
        decoder=decoder,
        source=LatentEncoder(decoder),
        scheduler=parts.scheduler(),
        channels=vae.config.latent_channels,
        scale=_levels(vae),
        patch=1,
        extra=extra,
    )


def _pixart(parts: Parts) -> Family:
    vae, transformer = parts.load("vae"), parts.load("transformer")
    scale = _levels(vae)
    decoder = LatentDecoder(vae)
    return Family(
        texts=encoders.MaskedTexts([parts.load("text_encoder")]),
        denoiser=pixart.PixArtDenoiser(transformer, scale),
        decoder=decoder,
        source=LatentEncoder(decoder),
        scheduler=parts.scheduler(),
        channels=vae.config.latent_channels,
        scale=scale,
        patch=transformer.config.patch_size,
    )


def _qwen(parts: Parts) -> Family:
    vae = parts.load("vae")
    decoder = LatentDecoder(vae, timed=True)
    return Family(
        texts=encoders.QwenTexts([parts.load("text_encoder")]),
        denoiser=qwen.QwenDenoiser(parts.load("transformer")),
        decoder=decoder,
        source=LatentEncoder(decoder),
        scheduler=parts.scheduler(),
        channels=vae.config.z_dim,
        scale=2 ** len(vae.temperal_downsample),
        patch=2,
        linear=True,
    )


def _wan(parts: Parts) -> Family:
    if parts.index.get("expand_timesteps"):
        raise ModelError("clips whose frames have timesteps of their own (Wan 2.2 TI2V) are not served")
    vae = parts.load("vae", torch.float32)  # in half precision it shows seams
    experts = [parts.load(name) for name in ("transformer", "transformer_2") if parts.has(name)]
    decoder = LatentDecoder(vae)
    starts = parts.index["_class_name"] == "WanImageToVideoPipeline"
    eye = _load_eye(parts) if starts and experts[0].config.image_dim is not None else (None, None)
    return Family(
        texts=encoders.WanTexts([parts.load("text_encoder")]),
        denoiser=wan.WanDenoiser(experts, parts.index.get("boundary_ratio")),
        decoder=decoder,
        scheduler=parts.scheduler(),
        channels=vae.config.z_dim,
        scale=vae.config.scale_factor_spatial,
        patch=experts[0].config.patch_size[1],
        apart=vae.config.scale_factor_temporal,
        source=StartEncoder(decoder, *eye) if starts else LatentEncoder(decoder),
    )


def _load_eye(parts: Parts) -> tuple[Any, Any]:
    processor = CLIPImageProcessor.from_pretrained(parts.files.path("image_processor"))
    return parts.load("image_encoder", torch.float32), processor


LOADERS: dict[str, Callable[[Parts], Family]] = {
    "flux": _flux,
    "sd3": _sd3,
    "sd": _sd,
    "sdxl": _sdxl,
    "pixart": _pixart,
    "qwen": _qwen,
    "wan": _wan,
}
