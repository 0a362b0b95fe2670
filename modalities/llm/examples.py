"""Tiny models of the text pipelines with random weights, and what to ask them, for `polymux plugin check`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertForSequenceClassification, BertModel

from polymux.core.plugins import Example
from polymux.core.tasks import Chat, Complete, Detokenize, Embed, Rank, Sampling, Tokenize
from polymux.core.testing.tiny import build, tiny_llama
from polymux.core.testing.tokenizers import byte_level, wordpiece

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant "
CONTEXT = 512
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 160,
}
HELLO = [{"role": "user", "content": "Hello"}]


def write_generation(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    build(lambda: tiny_llama(tokenizer.get_vocab_size(), CONTEXT)).save_pretrained(folder)


def write_embedding(folder: Path) -> None:
    write_tokenizer(folder)
    build(lambda: BertModel(BertConfig(**SIZES))).save_pretrained(folder)


def write_ranking(folder: Path) -> None:
    write_tokenizer(folder)
    build(lambda: BertForSequenceClassification(BertConfig(**SIZES, num_labels=1))).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    tokenizer: Tokenizer = wordpiece()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.save(str(folder / "tokenizer.json"))


def make_examples() -> list[Example]:
    torch.manual_seed(0)
    greedy, drawn = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=5)
    spelling = {"tokenize": [Tokenize(text="The end")], "detokenize": [Detokenize(ids=[5, 6, 7])]}
    return [
        Example(
            pipeline="text-generation",
            make=write_generation,
            options={"dtype": "float32", "deterministic": True},
            asks={
                "chat": [
                    Chat(messages=HELLO, max_tokens=6, sampling=greedy),
                    Chat(messages=[*HELLO, *HELLO], max_tokens=9, sampling=drawn, n=2),
                ],
                "complete": [Complete(prompts=["The quick", [5, 6, 7]], max_tokens=5, sampling=greedy)],
                **spelling,
            },
            refused={
                "chat": [Chat(messages=[{"role": "user", "content": "word " * 2000}], max_tokens=1)],
                "complete": [Complete(prompts=[[10**6]], max_tokens=1)],
            },
        ),
        Example(
            pipeline="text-embedding",
            make=write_embedding,
            options={"dtype": "float32"},
            asks={"embed": [Embed(inputs=["The end"]), Embed(inputs=["fox", "the lazy dog jumps"])], **spelling},
            refused={"embed": [Embed(inputs=["dog " * 500])]},
            tolerance=1e-4,
            dtype="<f4",
        ),
        Example(
            pipeline="text-ranking",
            make=write_ranking,
            options={"dtype": "float32"},
            asks={
                "rank": [Rank(pairs=[("fox", "the dog")]), Rank(pairs=[("the end", "fox"), ("dog", "end")])],
                **spelling,
            },
            refused={"rank": [Rank(pairs=[("fox", "dog " * 500)])]},
            tolerance=1e-4,
        ),
    ]
