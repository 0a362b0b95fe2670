"""`polymux paint MODEL PROMPT`: pictures into files, with a bar while they are made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polymux.core.errors import InvalidRequest

if TYPE_CHECKING:
    from polymux.core.service import Service
    from polymux.core.tasks import Paint, Picture

FORMATS = (".png", ".jpg", ".jpeg", ".webp")


def paint(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A name from `polymux list`, a folder, or hf:org/name.")],
    prompt: Annotated[str, typer.Argument(help="What to paint.")],
    out: Annotated[Path, typer.Option(help="A png, jpg or webp file; of several pictures, each gets its number.")],
    n: Annotated[int, typer.Option(help="Pictures.")] = 1,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT. Default: the model's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps. Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Picture k of n has seed + k. Default: drawn, and said.")] = None,
    guidance: Annotated[float | None, typer.Option(help="How closely to follow the prompt.")] = None,
    quality: Annotated[str | None, typer.Option(help="exact, balanced or fast.")] = None,
    adapter: Annotated[str | None, typer.Option(help="One of the model's adapters.")] = None,
) -> None:
    """Paint a text: files, and on a terminal a bar of the steps."""
    from polymux.core.assembly import assemble
    from polymux.core.cli.output import tell
    from polymux.core.cli.running import run_once
    from polymux.core.tasks import Paint

    if out.suffix.lower() not in FORMATS:
        raise InvalidRequest(f"--out must end in {', '.join(FORMATS)}", param="out")
    if not out.absolute().parent.is_dir():
        raise InvalidRequest(f"there is no folder {out.absolute().parent}", param="out")
    width, height = read_size(size)
    ask = Paint(
        prompt=prompt, n=n, width=width, height=height, steps=steps, seed=seed, guidance=guidance, quality=quality
    )
    service = assemble(ctx.obj.settings, ctx.obj.plugins, [model], tell)
    for picture in run_once(service, run(service, ask, adapter)):
        path = out if n == 1 else out.with_stem(f"{out.stem}-{picture.index}")
        write(picture, path)
        tell(f"{path}: {picture.width}x{picture.height}, seed {picture.seed}")


def read_size(size: str | None) -> tuple[int | None, int | None]:
    """Raises `InvalidRequest`."""
    if size is None:
        return None, None
    width, _, height = size.partition("x")
    if not (width.isascii() and width.isdecimal() and height.isascii() and height.isdecimal()):
        raise InvalidRequest(f"{size!r} is no size: write 1024x768", param="size")
    return int(width), int(height)


async def run(service: Service, ask: Paint, adapter: str | None) -> list[Picture]:
    """The pictures in order. Raises `InvalidRequest` for a model that paints none, and whatever a request may raise."""
    from polymux.core.tasks import Picture, Progress

    name = service.names()[0] if adapter is None else f"{service.names()[0]}:{adapter}"
    tasks = service.find(name).tasks
    if "image" not in tasks:
        raise InvalidRequest(f"{name} serves {', '.join(tasks)}, not image; `polymux serve {name}` serves it")
    await service.start()
    await service.wait_ready()
    pictures: list[Picture] = []
    async with service.open(name, "image", ask) as answers:
        with typer.progressbar(length=1, label="painting", file=sys.stderr) as bar:
            async for answer in answers:
                if isinstance(answer, Progress):
                    bar.length = answer.steps * ask.n
                    bar.update(1)
                elif isinstance(answer, Picture):
                    pictures.append(answer)
    return sorted(pictures, key=lambda picture: picture.index)


def write(picture: Picture, path: Path) -> None:
    from PIL import Image

    Image.frombytes("RGB", (picture.width, picture.height), picture.data).save(path)
