"""`--reload`: a changed plugin is swapped without dropping a request; one that does not load changes nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from polymux.core.config import PluginSettings, Settings
from polymux.core.plugins import load_plugins
from polymux.core.plugins.scaffold import write_plugin
from polymux.core.reload import Reloader
from polymux.gateway.app import create_app, refresh_app

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]


async def ask(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.post("/v1/rater", json={"model": "m", "texts": ["ab", "c"]})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_change_is_swapped_under_load(tmp_path: Path) -> None:
    project = write_plugin("pipeline", "rater", tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    plugins = load_plugins([project], disable=["starter"])
    (example,) = plugins.examples("rater")
    example.make(model)
    from polymux.core.vocabulary import NamedModel

    settings = Settings(
        plugins=PluginSettings(dirs=(project,), disable=("starter",)),
        models=(NamedModel("m", str(model), default=True),),
    )
    told: list[str] = []
    reloader = Reloader(settings, plugins, [], told.append)
    app = create_app(reloader.service, plugins=plugins)
    await reloader.service.start()
    try:
        await reloader.service.wait_ready()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            before = await ask(client)
            running = True
            answers = []

            async def keep_asking() -> None:
                while running:
                    answers.append(await ask(client))

            asking = [asyncio.create_task(keep_asking()) for _ in range(3)]

            program = project / "polymux_rater" / "program.py"
            program.write_text(
                program.read_text().replace("return list(sums / lengths)", "return list(-sums / lengths)")
            )
            work = project / "polymux_rater" / "work.py"
            work.write_text(work.read_text().replace('summary="Rate texts"', 'summary="Rate texts upside down"'))
            (changed,) = reloader.find_changed()
            assert reloader.find_changed() == []
            swapped = await reloader.reload([changed], lambda fresh: refresh_app(app, fresh))
            assert swapped, told
            after = await ask(client)
            running = False
            await asyncio.gather(*asking)
            assert after["scores"] == [-score for score in before["scores"]]
            kinds = {tuple(answer["scores"]) for answer in answers}
            assert kinds <= {tuple(before["scores"]), tuple(after["scores"])}, "no answer mixes both"
            assert "upside down" in (await client.get("/docs")).text
            assert 'task="rater"' in (await client.get("/metrics")).text, "counters go on"

            program.write_text("this is no Python")
            (changed,) = reloader.find_changed()
            assert not await reloader.reload([changed], lambda fresh: refresh_app(app, fresh))
            assert (await ask(client))["scores"] == after["scores"]
            cards = {card["name"]: card for card in (await client.get("/v1/plugins")).json()["data"]}
            assert "the change was not loaded" in json.dumps(cards["rater"]["notes"])
            assert cards["rater"]["status"] == "enabled"
    finally:
        await reloader.service.stop()
        shutil.rmtree(project)
