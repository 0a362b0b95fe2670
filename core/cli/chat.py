"""`polymux run MODEL [PROMPT]`: one answer on stdout, or a conversation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polymux.core.cli.output import tell
from polymux.core.errors import InvalidRequest, PolymuxError

if TYPE_CHECKING:
    import asyncio

    from polymux.core.service import Service

Model = Annotated[str, typer.Argument(help="A name from `polymux list`, a folder, or hf:org/name.")]
Prompt = Annotated[str | None, typer.Argument(help="What to say; read from standard input when left out.")]


def run_model(ctx: typer.Context, model: Model, prompt: Prompt = None) -> None:
    """Talk to a model: one prompt (argument or standard input), or a conversation on a terminal."""
    import asyncio

    from polymux.core.assembly import assemble

    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    service = None
    # a runner keeps one event loop over many questions, and turns Ctrl-C into a cancelled answer
    with asyncio.Runner() as runner:
        try:
            service = assemble(ctx.obj.settings, ctx.obj.plugins, [model], tell)
            check_chats(service, service.names()[0])
            runner.run(start(service))
            if prompt is not None:
                runner.run(answer(service, [{"role": "user", "content": prompt}]))
            else:
                converse(runner, service)
        finally:
            if service is not None:
                runner.run(service.stop())


def check_chats(service: Service, name: str) -> None:
    tasks = service.find(name).tasks
    if "chat" not in tasks:
        raise InvalidRequest(f"{name} serves {', '.join(tasks)}, not chat; `polymux serve {name}` serves it")


async def start(service: Service) -> None:
    if sys.stderr.isatty():
        tell(f"loading {service.names()[0]}")
    await service.start()
    await service.wait_ready()


def converse(runner: asyncio.Runner, service: Service) -> None:
    """Questions until the end of input. Ctrl-C stops an answer, and ends the conversation at the prompt."""
    tell("end with Ctrl-D; Ctrl-C stops an answer")
    messages: list[dict[str, Any]] = []
    while True:
        try:
            question = input("> ")
        except EOFError:
            typer.echo()
            return
        if not question.strip():
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            reply = runner.run(answer(service, asked))
        except KeyboardInterrupt:
            typer.echo()
        except PolymuxError as error:
            typer.echo(f"polymux: error: {error.message}", err=True)
        else:
            messages = [*asked, {"role": "assistant", "content": reply}]


async def answer(service: Service, messages: list[dict[str, Any]]) -> str:
    """Stream the model's reply to stdout, greedily so that it can be had again; returns it."""
    from polymux.core.tasks import Chat, Sampling, TextDelta  # needs numpy: `--help` must not

    ask = Chat(messages=messages, sampling=Sampling(temperature=0.0))
    parts: list[str] = []
    async with service.open(service.names()[0], "chat", ask) as answers:
        async for part in answers:
            if isinstance(part, TextDelta):
                parts.append(part.text)
                typer.echo(part.text, nl=False)
                sys.stdout.flush()
    typer.echo()
    return "".join(parts)
