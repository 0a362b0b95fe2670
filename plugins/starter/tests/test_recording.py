"""What the flow recipes do for a GPU: steps that it launches as one graph, and runs of one recipe alone."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import autoencoding
import course
import film
import paint
import pytest
import torch
from recording import Recorded, set_rate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TRAIN = Path(paint.__file__).parent
PAINT = (paint.Paint(heads=2, singles=1, text=32, vae=(4, 8, 8), length=16), (3, 64, 64), (8, 16, 16))
FILM = (film.Film(heads=2, layers=2, text=32, base=4, side=16, frames=5, length=12), (3, 5, 16, 16), (8, 2, 4, 4))
ON_THE_HOST = ("lift_fresh", "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")
"""Operations that wait for the device or copy to it, which a graph cannot hold."""


class Watch(TorchDispatchMode):
    """Notes what would break a recording."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [str(operation) for name in ON_THE_HOST if name in str(operation)]
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "drawn", "latents"), [PAINT, FILM], ids=["paint", "film"])
def test_a_step_reads_nothing_on_the_host(
    kind: course.Course, drawn: tuple[int, ...], latents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers builds masks differently while a stream is recorded: it is told that this one is."""
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    pipeline = kind.make(course.build_tokenizer(["a red circle"], kind.length))
    predict = kind.predict(pipeline)
    noisy, times, ids = torch.randn(2, *latents), torch.rand(2), torch.randint(4, 6, (2, kind.length))
    clips = torch.rand(2, *drawn)
    with Watch() as watch:
        predict(noisy, times, ids).sum().backward()
        spread = pipeline.vae.encode(clips).latent_dist
        loss = autoencoding.decode_freely(pipeline.vae, spread.sample()).sum() + spread.kl().sum()
        loss.backward()
    assert watch.found == []


def test_a_rate_changes_in_place_where_a_recorded_step_reads_it() -> None:
    weight = nn.Parameter(torch.zeros(2))
    rate = torch.tensor(1.0)
    told, kept = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=rate)
    held = kept.param_groups[0]["lr"]
    set_rate(told, 0.25)
    set_rate(kept, 0.25)
    assert told.param_groups[0]["lr"] == 0.25
    assert kept.param_groups[0]["lr"] is held and float(held) == 0.25


@pytest.mark.gpu
def test_a_recorded_run_is_the_run_as_it_was_written() -> None:
    """Also when the lessons' shape changes on the way, as the clips of a film's VAE do."""

    def run(recorded: bool) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).cuda()
        rate = torch.tensor(1e-2, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, fused=True)

        def learn(given: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = (model(given) - given).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = Recorded(learn) if recorded else learn
        losses = []
        for place in range(40):
            set_rate(optimizer, 1e-2 / (1 + place))
            losses.append(float(step(torch.randn(4 if place < 20 else 6, 8, device="cuda"))))
        return losses, model[0].weight.detach().clone()

    (losses, weight), (others, other) = run(False), run(True)
    assert losses == pytest.approx(others, rel=1e-4)
    torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_recipe_runs_alone_and_goes_on(tmp_path: Path) -> None:
    """A card's minutes go where they are needed."""
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\nmkdir -p "$3"; echo "$@" > "$3/training.json"; echo \'{"run": "paint"}\'\n')
    fake.chmod(0o755)
    told = {"OUT": str(tmp_path), "WORK": str(tmp_path / "work"), "ONLY": "paint", "RESUME": "models", "MINUTES": "3"}
    path = f"{fake.parent}:{os.environ['PATH']}"
    subprocess.run(["bash", TRAIN / "painting.sh", "--seed", "1"], env={**os.environ, **told, "PATH": path}, check=True)
    with tarfile.open(tmp_path / "paint.tar") as packed:
        asked = packed.extractfile("paint/training.json").read().decode()  # type: ignore[union-attr]
    assert "--minutes 3 --resume models/paint --seed 1" in asked
    assert not (tmp_path / "film.tar").exists()
