"""LoRA beside a denoiser: pictures are those of the model merged by hand, whoever else paints."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import ConfigError, ModelError
from polymux.core.models.files import ModelFiles
from polymux.core.tasks import Film, Paint
from polymux.core.testing.drive import Driver
from polymux.core.testing.painting import save_tiny_flux
from polymux.core.testing.pipelines import save_tiny
from polymux.modalities.diffusion.front import PaintFront
from polymux.modalities.diffusion.plugin import Filming, Painting
from polymux.modalities.diffusion.work import PICTURE, Painted

SLOW = ("sd", "pixart", "qwen", "wan, two experts")
KINDS = ("flux", "sd3", "sdxl", "wan", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW))
LAYERS = (nn.Linear, nn.Conv2d)
RANK = 3

Changes = dict[str, tuple[torch.Tensor, torch.Tensor]]


def draw_changes(model: nn.Module, seed: int, chosen: Callable[[str], bool], strength: float = 0.15) -> Changes:
    """Per layer the matrices of a change: of a convolution, one over places and one over channels."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LAYERS) and chosen(name):
            rest = layer.weight.shape[1:]
            down = torch.randn(RANK, *rest, generator=generator) * strength
            up = torch.randn(layer.weight.shape[0], RANK, *(1 for _ in rest[1:]), generator=generator) * strength
            changes[name] = down, up
    return changes


def merge(model: nn.Module, changes: Changes, scale: float) -> None:
    with torch.no_grad():
        for name, (down, up) in changes.items():
            weight = model.get_submodule(name).weight
            weight += scale * (up.flatten(1) @ down.flatten(1)).view_as(weight)


def is_inner(name: str) -> bool:
    """What trainers usually change."""
    return any(part in name for part in ("attn", "to_q", "ff.", "ffn", "proj_mlp", "proj_out", "mlp", "adaLN"))


def write_peft(folder: Path, changes: dict[str, Changes], alpha: float) -> None:
    [(_, own)] = changes.items()
    tensors = {}
    for name, (down, up) in own.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def write_diffusers(folder: Path, changes: dict[str, Changes], alpha: float) -> None:
    """As `save_lora_weights` does, with PEFT's settings in the header."""
    tensors, settings = {}, {}
    for part, own in changes.items():
        settings |= {f"{part}.r": RANK, f"{part}.lora_alpha": alpha}
        for name, (down, up) in own.items():
            tensors[f"{part}.{name}.lora_A.weight"] = down
            tensors[f"{part}.{name}.lora_B.weight"] = up
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "pytorch_lora_weights.safetensors", {"lora_adapter_metadata": json.dumps(settings)})


def write_trainer(folder: Path, changes: dict[str, Changes], alpha: float) -> None:
    """As kohya's scripts write Stable Diffusion's: underscores for dots, alphas beside the matrices."""
    tensors = {}
    for part, own in changes.items():
        prefix = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}[part]
        if part == "text_encoder" and "text_encoder_2" in changes:
            prefix = "lora_te1"
        for name, (down, up) in own.items():
            spelled = f"text_model.{name}" if part != "unet" and not name.startswith("text_model") else name
            key = f"{prefix}_{spelled.replace('.', '_')}"
            tensors[f"{key}.lora_down.weight"] = down
            tensors[f"{key}.lora_up.weight"] = up
            tensors[f"{key}.alpha"] = torch.tensor(alpha)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "style.safetensors")


class Model:
    """A tiny model with two adapters, and diffusers' pipeline over the model merged with one of them or none."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder / "model"
        self.peer = save_tiny_flux(self.folder) if kind == "flux" else save_tiny(kind, self.folder)
        self.front = PaintFront.load(ModelFiles(kind, self.folder))
        self.part = "unet" if hasattr(self.peer, "unet") else "transformer"
        self.changes: dict[str, dict[str, Changes]] = {}
        self.adapters: dict[str, str] = {}
        self.scales: dict[str, float] = {}

    def add(self, name: str, write: Callable[..., None], parts: tuple[str, ...], alpha: float, **options: Any) -> None:
        chosen = options.pop("chosen", is_inner)
        self.changes[name] = {
            part: draw_changes(getattr(self.peer, part), 7 + len(self.changes), chosen) for part in parts
        }
        assert all(self.changes[name].values())
        folder = self.folder.parent / name
        write(folder, self.changes[name], alpha)
        self.adapters[name] = str(folder)
        self.scales[name] = alpha / RANK

    def drive(self, device: Device, **options: Any) -> Driver:
        site = Site(device, SiteSettings(cache_bytes=1 << 22, superpage=1 << 16))
        pipeline = Filming() if self.kind.startswith("wan") else Painting()
        files = ModelFiles(self.kind, self.folder)
        return Driver(Loop(site, {"m": pipeline.load(files, site, {"adapters": self.adapters, **options})}))

    def submit(self, driver: Driver, job: str, adapter: str | None, **asked: Any) -> None:
        front = copy(self.front)
        front.adapters = tuple(self.adapters)
        if adapter is not None:
            front = front.variants()[adapter]
        film = self.kind.startswith("wan")
        fields = {"prompt": "The quick brown fox", "steps": 3, "seed": 1, "width": 32, "height": 16, **asked}
        ask = Film(**fields, frames=5) if film else Paint(**fields)
        work = front.prepare("video" if film else "image", ask).work
        assert work is not None
        driver.submit(job, "m", "video" if film else "image", work)

    def paint_merged(self, adapter: str | None, **asked: Any) -> np.ndarray:
        """By our own loop over a folder whose weights were changed by hand."""
        folder = self.folder.parent / f"merged {adapter}"
        if not folder.exists():
            for part, changes in self.changes.get(adapter or "", {}).items():
                merge(getattr(self.peer, part), changes, self.scales[adapter or ""])
            self.peer.save_pretrained(folder)
            for part, changes in self.changes.get(adapter or "", {}).items():
                merge(getattr(self.peer, part), changes, -self.scales[adapter or ""])
        plain = copy(self)
        plain.folder, plain.adapters = folder, {}
        driver = plain.drive(Device())
        plain.submit(driver, "job", None, **asked)
        driver.finish()
        return read(driver, "job")


def read(driver: Driver, job: str) -> np.ndarray:
    assert driver.error(job) is None
    [painted] = driver.outputs(job, PICTURE, Painted)
    return painted.pixels.astype(int)


def assert_near(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_adapted_pictures_are_those_of_merged_weights(kind: str, tmp_path: Path) -> None:
    """Two adapters and the plain model at once, in rows that join and leave: each as if it were alone and merged."""
    model = Model(kind, tmp_path)
    parts = (model.part, "transformer_2") if "two" in kind else (model.part,)
    model.add("calm", write_diffusers, parts, 6.0)
    model.add("loud", write_peft, (model.part,), 1.5)
    driver = model.drive(LaggedCpu())
    wishes = {"plain": None, "one": "calm", "two": "loud", "again": "calm"}
    for seed, (job, adapter) in enumerate(wishes.items()):
        model.submit(driver, job, adapter, seed=seed, steps=3 + seed)
        driver.run(steps=2)
    driver.finish()
    for seed, (job, adapter) in enumerate(wishes.items()):
        assert_near(read(driver, job), model.paint_merged(adapter, seed=seed, steps=3 + seed))
    changed = read(driver, "one") - model.paint_merged(None, seed=1, steps=4)
    assert np.abs(changed).max() > 4, "the adapter must matter"


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_a_trainers_file_changes_text_encoders_and_convolutions_too(kind: str, tmp_path: Path) -> None:
    model = Model(kind, tmp_path)
    texts = ("text_encoder", "text_encoder_2") if kind == "sdxl" else ("text_encoder",)
    wanted = ("attn", "proj_in", "q_proj", "fc1")
    model.add("style", write_trainer, (*texts, "unet"), 6.0, chosen=lambda name: any(part in name for part in wanted))
    driver = model.drive(Device())
    for job, adapter in {"one": "style", "plain": None, "again": "style"}.items():
        model.submit(driver, job, adapter)
        driver.finish()
    assert_near(read(driver, "one"), model.paint_merged("style"))
    assert_near(read(driver, "plain"), model.paint_merged(None))
    assert_near(read(driver, "again"), read(driver, "one"))
    assert driver.receipt("again").encoder_hits == 2
    assert driver.receipt("plain").encoder_hits == 0, "a text is another one with another encoder"


@pytest.mark.parametrize("kind", ["flux", "sdxl", "wan"])
def test_merged_projections_take_adapters(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymux.modalities.diffusion.tuning.compile_blocks", lambda blocks: None)
    model = Model(kind, tmp_path)
    everything = lambda name: not name.startswith(("time_embedding", "condition_embedder"))  # noqa: E731
    model.add("calm", write_diffusers, (model.part,), 1.0, chosen=everything)
    driver = model.drive(Device(), compile=True)
    for job, adapter in {"one": "calm", "plain": None}.items():
        model.submit(driver, job, adapter)
    driver.finish()
    assert_near(read(driver, "one"), model.paint_merged("calm"))
    assert_near(read(driver, "plain"), model.paint_merged(None))


@pytest.mark.slow
def test_compiled_blocks_take_adapters(tmp_path: Path) -> None:
    """One block is compiled with and without, for all blocks and adapters."""
    model = Model("sd3", tmp_path)
    for name in ("one", "two"):
        model.add(name, write_diffusers, ("transformer",), 6.0)
    driver = model.drive(Device(), compile=True)
    wishes = ["one", None, "two", "one"]
    for number, name in enumerate(wishes):
        model.submit(driver, str(number), name)
    driver.finish()
    for number, name in enumerate(wishes):
        assert_near(read(driver, str(number)), model.paint_merged(name))


def test_adapters_come_and_go_in_an_arena_that_holds_one(tmp_path: Path) -> None:
    model = Model("sd3", tmp_path)
    for name in ("one", "two", "three"):
        model.add(name, write_diffusers, ("transformer",), 6.0)
    site_bytes = model.drive(Device()).loop.programs["m"].adapters.cache.nbytes
    site = Site(LaggedCpu(), SiteSettings(cache_bytes=-(-site_bytes // (1 << 14)) * 2 << 14, superpage=1 << 14))
    program = Painting().load(ModelFiles("sd3", model.folder), site, {"adapters": model.adapters})
    driver = Driver(Loop(site, {"m": program}))
    names = ["one", "two", "three", "one", "two"]
    for number, name in enumerate(names):
        model.submit(driver, str(number), name)
    driver.finish()
    for number, name in enumerate(names):
        assert_near(read(driver, str(number)), model.paint_merged(name))


@pytest.mark.anyio
async def test_an_adapter_is_asked_for_by_the_models_name(serve: Any, tmp_path: Path) -> None:
    model = Model("sd3", tmp_path)
    model.add("calm", write_diffusers, ("transformer",), 6.0)
    async with serve(Painting(), {"sd3": model.folder}, adapters=model.adapters) as behind:
        http = behind.http
        named = {each["id"] for each in (await http.get("/v1/models")).json()["data"]}
        assert named == {"sd3", "sd3:calm"}
        body = {"prompt": "a fox", "size": "32x16", "steps": 2, "seed": 1}
        asked = [http.post("/v1/images/generations", json={**body, "model": name}) for name in ("sd3", "sd3:calm")]
        plain, calm = [(await each).json()["data"][0]["b64_json"] for each in asked]
        assert plain != calm
        missing = await http.post("/v1/images/generations", json={**body, "model": "sd3:loud"})
        assert missing.status_code == 404
        assert "sd3:calm" in missing.text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("sd3", tmp_path_factory.mktemp("plain"))


GOOD = {
    "transformer.transformer_blocks.0.attn.to_q.lora_A.weight": torch.zeros(2, 16),
    "transformer.transformer_blocks.0.attn.to_q.lora_B.weight": torch.zeros(16, 2),
}
LAYER = "transformer.transformer_blocks.0.attn.to_q"
BAD: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "empty": ({}, "empty"),
    "half": ({f"{LAYER}.lora_A.weight": torch.zeros(2, 16)}, "one of its two"),
    "another model": ({key.replace("blocks.0", "blocks.9"): value for key, value in GOOD.items()}, "no linear layer"),
    "other sizes": ({**GOOD, f"{LAYER}.lora_A.weight": torch.zeros(2, 99)}, "16 by 99"),
    "other ranks": ({**GOOD, f"{LAYER}.lora_A.weight": torch.zeros(3, 16)}, "no pair"),
    "dora": ({**GOOD, f"{LAYER}.dora_scale": torch.zeros(2)}, "plain LoRA"),
    "weights": ({f"{LAYER}.weight": torch.zeros(16, 16)}, "no layer"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_adapter_of_the_model_is_refused(case: str, plain: Model, tmp_path: Path) -> None:
    tensors, said = BAD[case]
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(ModelError, match=said):
        Painting().load(ModelFiles("sd3", plain.folder), Site(), {"adapters": {"bad": str(tmp_path)}})


def test_folders_that_hold_no_adapter_are_refused(plain: Model, tmp_path: Path) -> None:
    def load(folder: Path, **settings: Any) -> None:
        site = Site(Device(), SiteSettings(**settings))
        Painting().load(ModelFiles("sd3", plain.folder), site, {"adapters": {"bad": str(folder)}})

    with pytest.raises(ModelError, match="0 safetensors"):
        load(tmp_path / "nowhere")
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path)
    save_file(GOOD, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(ConfigError, match="room"):
        load(tmp_path, cache_bytes=1 << 10, superpage=1 << 10)
