"""Pictures and texts as vectors of one space (CLIP, Radford et al. 2021; SigLIP, Zhai et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad
from transformers import AutoModel

from polymux.core.batch.encode import EncodeRow, EncodeStage
from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.compute.dtype import read_dtype
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, InvalidRequest, ModelError
from polymux.core.pipeline import Program
from polymux.core.tasks import Vector
from polymux.modalities.vision.processor import read_processor
from polymux.modalities.vision.scale import PixelScale
from polymux.modalities.vision.tiles import TileEncoder
from polymux.modalities.vision.work import VECTOR, Item, ShowWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles


class VectorReader(OneShotModel):
    """What an encoder left of a picture, as one vector of unit length: the mean of its vectors."""

    def __init__(self, stage: EncodeStage, dim: int) -> None:
        """`dim`: the width of a vector, less than the block's where the rest goes elsewhere."""
        self._stage = stage
        self._dim = dim

    def forward(self, items: list[tuple[list[int], int]], slabs: list[Tensor]) -> list[Any]:
        """Items are (blocks, vectors)."""
        found = [self._stage.view[blocks].flatten(0, 1)[:count, : self._dim] for blocks, count in items]
        return list(normalize(torch.stack([vectors.float().mean(dim=0) for vectors in found]), dim=1))


class TextTower(OneShotModel):
    """Token ids in, one float32 vector of unit length out."""

    def __init__(self, model: Any, device: torch.device, *, padded: bool) -> None:
        """`padded`: texts were padded to the longest in training, and what pads is read (SigLIP)."""
        config = model.config.text_config
        self._model = model
        self._device = device
        self._filler: int = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
        self._longest: int = config.max_position_embeddings
        self._padded = padded

    def forward(self, items: list[list[int]], slabs: list[Tensor]) -> list[Any]:
        width = self._longest if self._padded else max(map(len, items))
        rows = [pad(torch.tensor(ids), (0, width - len(ids)), value=self._filler) for ids in items]
        told: dict[str, Tensor] = {"input_ids": torch.stack(rows).to(self._device)}
        if not self._padded:
            lengths = torch.tensor([len(ids) for ids in items])
            told["attention_mask"] = (torch.arange(width) < lengths[:, None]).long().to(self._device)
        return list(normalize(pooled(self._model.get_text_features(**told)).float(), dim=1))


def pooled(output: Any) -> Tensor:
    """transformers' towers gave the vectors themselves before they gave all they know."""
    return output if isinstance(output, Tensor) else output.pooler_output


async def show(job: Job, encode: EncodeStage, read: OneShotStage, items: Mapping[int, Item]) -> list[OneShotRow]:
    """Rows that bring a vector of each picture, by its number; how many were known goes into the receipt."""
    different = {item.digest: item for item in items.values()}
    row = EncodeRow(job, different, {digest: encode.blocks(item) for digest, item in different.items()})
    await job.start(encode, row)
    if row.holding is None:
        raise InternalError("the encoder left nothing")
    job.receipt.encoder_hits = len(items) - len(different) + len(row.found)
    places = row.places()
    rows = []
    for number, item in items.items():
        first = places[item.digest]
        blocks = row.holding.blocks[first : first + row.sizes[item.digest]]
        reader = OneShotRow(job, (blocks, encode.model.count(item)), 1, number)
        reader.reads = [row.holding]
        rows.append(job.start(read, reader))
    return rows


async def tell(job: Job, rows: list[OneShotRow]) -> None:
    for row in rows:
        await row
        vector = row.result.float().numpy()
        if not np.isfinite(vector).all():
            raise InternalError("the model's output was not finite for this request")
        job.emit(VECTOR, Vector(row.branch, vector.tobytes()))


class ShowProgram(Program):
    """Embeds pictures and texts. A picture that was seen costs no pass."""

    def __init__(self, encode: EncodeStage, encoder: TileEncoder, text: TextTower, site: Site) -> None:
        self.work = {"embed": ShowWork}
        self.encode = encode
        self._encoder = encoder
        self._text = OneShotStage("text", text, site, max_units=site.settings.max_units * 8, to_host=True)
        reader = VectorReader(encode, encoder.inlay.shape[-1])
        self._read = OneShotStage("vectors", reader, site, max_units=256, to_host=True)
        self.stages = (encode, self._text, self._read)

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, ShowWork):
            raise InvalidRequest("malformed embedding work")
        for item in work.pictures.values():
            self._encoder.check(item)
        rows = [job.start(self._text, OneShotRow(job, ids, len(ids), number)) for number, ids in work.texts.items()]
        if work.pictures:
            rows += await show(job, self.encode, self._read, work.pictures)
        await tell(job, rows)
        job.receipt.input_units = work.tokens

    def describe(self) -> dict[str, Any]:
        inlay = self._encoder.inlay
        return {"dtype": str(inlay.dtype).removeprefix("torch."), "dimensions": inlay.shape[-1]}


def split_towers(model: Any, processor: Mapping[str, Any], site: Site) -> tuple[TileEncoder, TextTower]:
    """A model with `get_image_features` and `get_text_features`, on the device, as its two towers."""
    device = site.device
    model = model.eval().requires_grad_(False)
    dtype, config = next(model.parameters()).dtype, model.config
    dim = getattr(config, "projection_dim", None) or config.vision_config.hidden_size
    side = config.vision_config.image_size

    def see(pixels: Tensor) -> Tensor:
        return pooled(model.get_image_features(pixel_values=pixels))[:, None]

    encoder = TileEncoder(see, PixelScale(processor, device, dtype), side, 1, dim, dtype)
    return encoder, TextTower(model, device.torch, padded=config.model_type.startswith("siglip"))


def load_showing(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> ShowProgram:
    """Raises `ModelError` for what cannot be loaded."""
    try:
        model = AutoModel.from_pretrained(files.folder, dtype=read_dtype(options))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load an image embedder from {files.folder}: {error}") from error
    encoder, text = split_towers(model.to(site.device.torch), read_processor(files), site)
    return ShowProgram(EncodeStage("encode", encoder, site, max_units=32), encoder, text, site)
