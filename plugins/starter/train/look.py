"""Trains `starter/look`: a SigLIP that knows which caption belongs to which picture.

python eye.py --out OUT/eye
python look.py --out OUT/look --eye OUT/eye/eye.safetensors

Half of a batch are scenes drawn at random, the other half are neighbours: scenes whose captions differ from one of the
first half in one word, or in the order of the words. Telling those apart is what there is to learn.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import torch
from eye import PROCESSOR, SMALL, WHOLE, Size, Witness, load_eye, roughen, scale, see
from folder import write_folder
from loop import read_arguments, train
from pictures import Easel
from scenes import Scene, list_scenes
from torch import Generator, Tensor, nn
from torch.nn.functional import log_softmax, normalize
from transformers import SiglipConfig, SiglipModel
from vocabulary import make_tokenizer

MARKS = ("<pad>", "<end>")
LONGEST = 32
"""Tokens of a text."""
SPELLINGS = ("{}", "{}.", "a picture of {}", "a photo of {}", "an image of {}.", "this is {}")
NEIGHBOURS = 8
WITNESS = 0.3
"""Weight of the loss on patches."""
STEEPEST = 100.0


def make_model(vocabulary: int, size: Size) -> SiglipModel:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": size.hidden // 32,
        "max_position_embeddings": LONGEST,
        "projection_size": size.hidden,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=size.tower))
    with torch.no_grad():
        model.logit_scale.fill_(2.3)
        model.logit_bias.zero_()
    return model


def find_neighbours(scenes: list[Scene], seed: int) -> Tensor:
    """(scenes, NEIGHBOURS): for each, some whose captions are nearly its own; itself where there are too few."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    keys = []
    for number, scene in enumerate(scenes):
        words = scene.caption.split()
        own = [(*words[:place], "*", *words[place + 1 :]) for place in range(len(words))]
        own.append(tuple(sorted(words)))
        keys.append(own)
        for key in own:
            groups[key].append(number)
    chance = Random(seed)
    rows = []
    for number, own in enumerate(keys):
        found = [[each for each in groups[key] if each != number] for key in own]
        found = [group for group in found if group] or [[number]]
        rows.append([chance.choice(chance.choice(found)) for _ in range(NEIGHBOURS)])
    return torch.tensor(rows)


def agree(pictures: Tensor, texts: Tensor, same: Tensor, steepness: Tensor) -> Tensor:
    """The loss of vectors (batch, dim): each picture is to choose its caption, and each caption its picture, among all;
    `same` (batch, batch) says which show one scene."""
    with torch.autocast(pictures.device.type, enabled=False):  # what is steep must not be rounded
        angles = normalize(pictures.float(), dim=-1) @ normalize(texts.float(), dim=-1).T
        scores = angles * steepness.exp().clamp(max=STEEPEST)
    wanted = same / same.sum(1, keepdim=True)
    chosen = [(log_softmax(each, 1) * wanted).sum(1).mean() for each in (scores, scores.T)]
    return -torch.stack(chosen).mean()


def main() -> None:
    wanted = read_arguments(__doc__, steps=6000, batch=1024, rate=1e-3, small=(600, 64))
    size = SMALL if wanted.small else WHOLE
    scenes = list_scenes(size.families, held_out=False)
    easel = Easel(scenes, size.side, wanted.device)
    tokenizer = make_tokenizer(MARKS, lower=True)
    model: Any = make_model(tokenizer.get_vocab_size(), size)
    model = model.to(wanted.device)
    load_eye(model.vision_model, wanted.eye)
    witness = Witness(size).to(wanted.device)
    near = find_neighbours(scenes, wanted.seed).to(wanted.device)
    captions = spell_captions(scenes, tokenizer).to(wanted.device)

    def lose(generator: Generator) -> tuple[Tensor, dict[str, Tensor]]:
        device = wanted.device
        first = easel.choose(wanted.batch // 2, generator, {"pair": 2.0})
        choice = torch.randint(NEIGHBOURS, (len(first),), generator=generator, device=device)
        index = torch.cat([first, near[first, choice]])
        layout = easel.lay(index, generator)
        patches = see(model.vision_model, scale(roughen(easel.draw(layout), generator)))
        spelling = torch.randint(len(SPELLINGS), (len(index),), generator=generator, device=device)
        texts = model.text_model(input_ids=captions[index, spelling]).pooler_output
        same = (index[:, None] == index).float()
        matched = agree(model.vision_model.head(patches), texts, same, model.logit_scale)
        return matched + WITNESS * witness(patches, easel, layout), {"matched": matched}

    if train(nn.ModuleList([model, witness]), lose, wanted):
        write_folder(
            "look",
            wanted,
            model,
            tokenizer,
            {
                **PROCESSOR,
                "image_processor_type": "SiglipImageProcessor",
                "size": {"height": size.side, "width": size.side},
                "resample": 3,
            },
            end="<end>",
            pad="<pad>",
            texts={"model_input_names": ["input_ids"], "model_max_length": LONGEST},  # as SigLIP's: padded, and no mask
        )


def spell_captions(scenes: list[Scene], tokenizer: Any) -> Tensor:
    """(scenes, SPELLINGS, LONGEST) token ids."""
    tokenizer.enable_padding(length=LONGEST, pad_id=0, pad_token=MARKS[0])
    texts = [spelling.format(scene.caption).lower() for scene in scenes for spelling in SPELLINGS]
    ids = torch.tensor([each.ids for each in tokenizer.encode_batch(texts)])
    tokenizer.no_padding()
    return ids.view(len(scenes), len(SPELLINGS), LONGEST)


if __name__ == "__main__":
    main()
