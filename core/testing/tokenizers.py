"""Small real tokenizers of the three families, built in a moment, for tests that need no model."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Stop! The end, the END.",
    "Paris is the capital of France; naïve café, señor, über, 東京 and Ελλάδα.",
    "def add(a, b):\n    return a + b  # 😀 emoji 👩‍👩‍👧 family",
]

MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
"""Special tokens of the two decoder tokenizers."""


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3, Qwen: any text is some sequence of tokens, characters may be split."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def letters(count: int = 80) -> tokenizers.Tokenizer:
    """Byte-level BPE that knows `count` bytes, small letters first, and merges none: for models with few tokens."""
    common = "Ġabcdefghijklmnopqrstuvwxyz"
    alphabet = [*common, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(common))]
    tokenizer = tokenizers.Tokenizer(models.BPE({each: id for id, each in enumerate(alphabet[:count])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """BPE with byte fallback and a space that decoding drops from the start, as in Llama 2 and Mistral."""
    pieces = ["<unk>", *MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted({character for text in CORPUS[:1] for character in text if character != " "})
    pieces += ["th", "▁th", "▁the", "en", "▁en", "▁end", "é"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("e", "n"), ("▁", "en"), ("▁en", "d")]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *MARKS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    """WordPiece between [CLS] and [SEP], as in BERT; its file asks for truncation and padding, like many do."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer
