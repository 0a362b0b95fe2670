"""The recipes of the starters that see: what is trained is what will be asked, and a run that stops goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import eye
import look
import pytest
import see
import sheets
import torch
from judge_see import draw_questions, is_right
from loop import Wanted, train
from pictures import Easel
from questions import ASKED, list_questions
from safetensors.torch import save_file
from scenes import FAMILIES, STILL, Scene, Thing, list_scenes
from torch import nn
from vocabulary import make_tokenizer

from polymux.core.text.template import ChatTemplate

TINY = eye.Size(32, 32, 2, ("one",))
PLACES = (TINY.cells // see.MERGED) ** 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(sheets.MARKS)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    return see.make_model(tokenizer, TINY).eval()


def test_the_words_of_the_scenes_are_tokens(tokenizer: Any) -> None:
    for text in ("a small purple triangle left of a large cyan square", "Is the star above the ring?", "CAT", "red"):
        assert len(tokenizer.encode(text).ids) == len(text.rstrip("?").split()) + text.endswith("?")
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    odd = "naïve 東京 <|end"
    assert tokenizer.decode(tokenizer.encode(odd).ids) == odd


def test_every_question_fits_and_has_one_answer(tokenizer: Any) -> None:
    scenes = list_scenes(STILL, held_out=True)[::20] + list_scenes(("digit", "word"), held_out=False)
    assert {question.subject for scene in scenes for question in list_questions(scene)} >= set(ASKED)
    for scene in scenes:
        asked = list_questions(scene)
        texts = {question.text: question.answer for question in asked if question.subject != "check"}
        assert all(texts[each.text] == each.answer for each in asked if each.subject != "check")
        pages = sheets.make_pages([(each.text, each.answer) for each in asked], tokenizer)
        assert int(pages.lengths.max()) <= sheets.LONGEST


def test_answers_say_what_is_in_the_picture() -> None:
    pair = Scene("pair", (Thing("circle", "red", "large"), Thing("star", "blue", "small")), "above")
    answers = {(each.text, each.answer) for each in list_questions(pair)}
    for expected in (
        ("What colour is the star?", "blue"),
        ("Which shape is red?", "circle"),
        ("Is the star left of, right of, above or below the circle?", "below"),
        ("Is the circle above the star?", "yes"),
        ("Is the circle below the star?", "no"),
        ("Which shape is larger?", "circle"),
        ("How many shapes are there?", "2"),
    ):
        assert expected in answers
    five = Scene("count", (Thing("cross", "cyan"),) * 5)
    assert ("How many crosses are there?", "5") in {(each.text, each.answer) for each in list_questions(five)}


def lay_out(tokenizer: Any, asked: list[tuple[str, str]], joined: bool) -> sheets.Sheet:
    covers, pages = sheets.make_covers(tokenizer, PLACES), sheets.make_pages(asked, tokenizer)
    chosen = torch.arange(len(asked))[None]
    return sheets.set_sheet(covers, pages, torch.tensor([3]), chosen, torch.tensor([joined]))


ASKED_TWICE = [("What shape is it?", "star"), ("What colour is it?", "red"), ("Describe the picture.", "a red star")]


def test_a_conversation_in_training_is_what_the_template_writes(tokenizer: Any) -> None:
    """Tokens, places of the picture, and whose turn it is: as a server will ask."""
    sheet = lay_out(tokenizer, ASKED_TWICE, joined=True)
    template = ChatTemplate({"default": see.TEMPLATE}, {}, sees=True)
    messages: list[dict[str, Any]] = [{"role": "system", "content": sheets.PREFACES[3]}]
    for number, (question, answer) in enumerate(ASKED_TWICE):
        picture = [{"type": "image"}] if number == 0 else []
        messages += [
            {"role": "user", "content": [{"type": "text", "text": question}, *picture]},
            {"role": "assistant", "content": answer},
        ]
    text = template.render(messages)
    mark = f"{sheets.FENCE}{sheets.GLOBAL}{sheets.IMAGE * PLACES}{sheets.FENCE}"
    expected = tokenizer.encode(text.replace(sheets.IMAGE, mark)).ids[:-1]  # without the turn that is opened last
    assert sheet.ids[0, : len(expected)].tolist() == expected
    assert sheet.ids[0, len(expected) :].tolist() == [0] * (sheet.ids.shape[1] - len(expected))
    learnt = tokenizer.decode(sheet.wanted[0][sheet.wanted[0] >= 0].tolist(), skip_special_tokens=False)
    assert learnt == "".join(f"{answer}{sheets.END}" for _, answer in ASKED_TWICE)


def test_questions_apart_are_answered_as_if_each_were_alone(tokenizer: Any, model: Any) -> None:
    """What a batch learns of a question behind others is what transformers computes for it alone."""
    torch.manual_seed(1)
    pixels = torch.randn(1, 3, TINY.side, TINY.side)
    patches = eye.see(model.model.vision_model, pixels)
    torch.testing.assert_close(patches, model.model.vision_model(pixel_values=pixels).last_hidden_state)
    sheet = lay_out(tokenizer, ASKED_TWICE, joined=False)
    together, _ = see.answer(model, patches, sheet)
    losses, counts = [], []
    for asked in ASKED_TWICE:
        alone = lay_out(tokenizer, [asked], joined=True)
        labels = alone.wanted.roll(1, 1)
        told = model(input_ids=alone.ids, pixel_values=pixels[:, None], labels=labels)
        losses.append(told.loss)
        counts.append(int((labels >= 0).sum()))
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)


def test_neighbours_differ_in_a_word_or_in_the_order_of_words() -> None:
    scenes = list_scenes(("one", "count", "digit"), held_out=False)
    near = look.find_neighbours(scenes, seed=1)
    for number in range(0, len(scenes), 17):
        words = scenes[number].caption.split()
        for other in near[number].tolist():
            told = scenes[other].caption.split()
            same_words = sorted(words) == sorted(told)
            assert same_words or sum(a != b for a, b in zip(words, told, strict=True)) == 1


def test_matching_pulls_a_scene_s_pictures_and_captions_together() -> None:
    same = torch.eye(4)
    right, wrong = torch.eye(4, 8), torch.eye(4, 8).roll(1, 0)
    steep = torch.tensor(2.3)
    assert look.agree(right, right, same, steep) < 0.1 < look.agree(right, wrong, same, steep)
    twice = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    assert look.agree(right[[0, 0, 2, 3]], right[[0, 0, 2, 3]], twice, steep) < 0.75


def test_a_run_that_stops_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    def run(out: str, **changed: Any) -> tuple[bool, torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 1)
        wanted = Wanted(tmp_path / out, 40, 8, 1e-2, 1, float("inf"), torch.device("cpu"))
        wanted.out.mkdir(exist_ok=True)
        taken = 0

        def lose(generator: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            nonlocal taken
            taken += 1
            if taken == changed.get("stop"):
                wanted.seconds = 0.0
            inputs = torch.randn(wanted.batch, 3, generator=generator)
            return (layer(inputs) - inputs.sum(1, keepdim=True)).square().mean(), {}

        wanted.resume = changed.get("resume")
        return train(layer, lose, wanted), layer.weight.detach()

    whole, expected = run("whole")
    stopped, _ = run("stopped", stop=15)
    finished, found = run("again", resume=tmp_path / "stopped")
    assert (whole, stopped, finished) == (True, False, True)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)  # moments are kept in bfloat16
    assert json.loads((tmp_path / "again" / "log.jsonl").read_text().splitlines()[-1])["step"] == 39


def test_an_encoder_that_has_learnt_is_taken_over(tmp_path: Path, tokenizer: Any) -> None:
    """One file for both towers; one of another size is refused."""
    torch.manual_seed(2)
    learnt = eye.make_tower(TINY)
    save_file(learnt.state_dict(), tmp_path / eye.EYE)
    pixels = torch.randn(2, 3, TINY.side, TINY.side)
    expected = eye.see(learnt, pixels)
    for tower in (look.make_model(64, TINY).vision_model, see.make_model(tokenizer, TINY).model.vision_model):
        eye.load_eye(tower, tmp_path / eye.EYE)
        torch.testing.assert_close(eye.see(tower, pixels), expected)
    with pytest.raises(ValueError, match="not an eye"):
        eye.load_eye(eye.make_tower(eye.SMALL), tmp_path / eye.EYE)


def test_judges_ask_about_held_out_scenes_alone() -> None:
    seen = {scene.caption for scene in list_scenes(tuple(FAMILIES), held_out=False)}
    held = {scene.caption for scene in list_scenes(tuple(FAMILIES), held_out=True)}
    assert not seen & held
    asked = draw_questions(("one", "count", "digit"), 24, seed=3)
    assert [each.question.subject for each in asked] == list(ASKED) * 4
    assert all(each.url.startswith("data:image/png;base64,") for each in asked)
    assert is_right(" Red.", "red") and not is_right("dark red", "red")


def test_marks_of_the_witness_fit_the_patches() -> None:
    easel, generator = Easel(list_scenes(("one",), held_out=False), TINY.side), torch.Generator().manual_seed(0)
    layout = easel.lay(easel.choose(4, generator), generator)
    patches = eye.see(eye.make_tower(TINY), eye.scale(easel.draw(layout)))
    loss = eye.Witness(TINY)(patches, easel, layout)
    assert loss.shape == () and torch.isfinite(loss)
