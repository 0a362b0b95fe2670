"""Trains `starter/see`: a SmolVLM that answers questions about pictures and describes them.

python eye.py --out OUT/eye
python see.py --out OUT/see --eye OUT/eye/eye.safetensors

A picture is shown once, and several questions about it stand behind it. In half of the samples each of them sees the
picture alone, as if it were the first; in the other half they are one conversation.
"""

from __future__ import annotations

from typing import Any

import torch
from eye import PROCESSOR, SMALL, WHOLE, Size, Witness, load_eye, roughen, scale, see
from folder import write_folder
from loop import read_arguments, train
from pictures import Easel
from scenes import list_scenes
from sheets import END, IGNORED, IMAGE, MARKS, PAD, PREFACES, Book, Sheet, make_covers, set_sheet
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
from vocabulary import make_tokenizer

MERGED = 2
"""Patches of a side that become one vector."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for part in message.content or [] %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}"
    "{% for part in message.content or [] %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Pictures stand before words, whatever their order in the message: so they do in training."""
WITNESS = 0.3
CONTEXT = 1024


def make_model(tokenizer: Any, size: Size) -> SmolVLMForConditionalGeneration:
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    text = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers - 1,
        "num_attention_heads": size.hidden // 32,
        "num_key_value_heads": size.hidden // 32,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "pad_token_id": pad,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    model = SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            text_config=text,
            vision_config=size.tower,
            scale_factor=MERGED,
            image_token_id=tokenizer.token_to_id(IMAGE),
            tie_word_embeddings=True,
            pad_token_id=pad,
        )
    )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, pad
    return model


def main() -> None:
    wanted = read_arguments(__doc__, steps=7000, batch=512, rate=1e-3, small=(600, 32))
    size = SMALL if wanted.small else WHOLE
    scenes = list_scenes(size.families, held_out=False)
    easel = Easel(scenes, size.side, wanted.device)
    tokenizer = make_tokenizer(MARKS)
    model: Any = make_model(tokenizer, size)
    model = model.to(wanted.device)
    load_eye(model.model.vision_model, wanted.eye)
    witness = Witness(size).to(wanted.device)
    book, covers = (
        Book(scenes, tokenizer, wanted.device),
        make_covers(tokenizer, (size.cells // MERGED) ** 2).to(wanted.device),
    )

    def lose(generator: Generator) -> tuple[Tensor, dict[str, Tensor]]:
        index = easel.choose(wanted.batch, generator, {"pair": 2.0, "count": 2.0})
        layout = easel.lay(index, generator)
        patches = see(model.model.vision_model, scale(roughen(easel.draw(layout), generator)))
        draws = torch.rand(2, wanted.batch, generator=generator, device=wanted.device)
        cover = (draws[0] * len(PREFACES)).long()
        sheet = set_sheet(covers, book.pages, cover, book.open(index, generator), draws[1] < 0.5)
        answered, right = answer(model, patches, sheet)
        shown = witness(patches, easel, layout)
        return answered + WITNESS * shown, {"answered": answered, "right": right, "shown": shown}

    if train(nn.ModuleList([model, witness]), lose, wanted):
        sizes = {"size": {"longest_edge": size.side}, "max_image_size": {"longest_edge": size.side}}
        told = {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False, "resample": 1}
        write_folder(
            "see", wanted, model, tokenizer, {**PROCESSOR, **told, **sizes}, end=END, pad=PAD, template=TEMPLATE
        )


def answer(model: Any, patches: Tensor, sheet: Sheet) -> tuple[Tensor, Tensor]:
    """The loss, and the part of all tokens to learn that would have been said right."""
    words = model.model.text_model.get_input_embeddings()(sheet.ids)
    vectors = model.model.connector(patches).to(words.dtype)
    words = words.masked_scatter((sheet.ids == model.config.image_token_id)[..., None], vectors)
    hidden = model.model.text_model(
        inputs_embeds=words, attention_mask=sheet.seen, position_ids=sheet.places, use_cache=False
    ).last_hidden_state
    learnt = sheet.wanted != IGNORED
    said, wanted = model.lm_head(hidden[learnt]).float(), sheet.wanted[learnt]
    return cross_entropy(said, wanted), (said.argmax(1) == wanted).float().mean()


if __name__ == "__main__":
    main()
