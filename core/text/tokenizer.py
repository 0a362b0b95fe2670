"""A model's tokenizer, read from its own files through the `tokenizers` library; no torch, no transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tokenizers

from polymux.core.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
"""How byte-fallback vocabularies spell a token that stands for one byte."""


MARK = re.compile(r"<.*>\Z", re.DOTALL)
"""How vocabularies spell added tokens that are marks, though they do not always call them special."""


class Tokenizer:
    """Text to token ids and back. Safe to share between threads.

    `eos_ids` end a text, `special_ids` have no text of their own, `mark_ids` are those and all others that stand for
    themselves (<tool_call>) rather than for their spelling, `size` is the highest id plus one,
    `special_tokens` are the named ones (bos_token, eos_token, ...) that chat templates may write.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        # What a file says about padding and truncation would change answers behind the caller's back.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._pieces: dict[int, bytes] = {}
        self.special_tokens = special_tokens or {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.mark_ids = self.special_ids | {id for id, token in added.items() if MARK.match(token.content)}
        named_eos = self.find(self.special_tokens.get("eos_token"))
        self.eos_ids = eos_ids if named_eos is None else eos_ids | {named_eos}

        vocabulary = backend.get_vocab()
        layout = json.loads(backend.to_str())
        self.size = max(vocabulary.values(), default=-1) + 1
        steps = decoder_steps(layout.get("decoder"))
        self.byte_level = [step for step in steps if step != "Fuse"] == ["ByteLevel"]
        fallback = "ByteFallback" in steps
        self.byte_ids = frozenset(id for token, id in vocabulary.items() if fallback and BYTE_TOKEN.match(token))
        # Only where bytes become parts of tokens as they are does a long text surely mean many tokens.
        faithful = self.byte_level and layout.get("normalizer") is None
        self._dropped = bytes(byte for character, byte in BYTE_OF.items() if character not in vocabulary)
        self._longest = max(map(len, vocabulary), default=1) if faithful else None
        self._anchor = backend.encode("a", add_special_tokens=False).ids

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """A model's tokenizer: tokenizer.json, and what its configuration files say of special tokens.

        Raises `ModelError` when tokenizer.json is missing or a file cannot be read.
        """
        path = files.path("tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
        named = named_tokens(files.json("special_tokens_map.json")) | named_tokens(files.json("tokenizer_config.json"))
        configs = [files.json("generation_config.json"), files.config()]
        eos_ids = frozenset(id for config in configs for id in token_ids(config.get("eos_token_id")))
        return cls(backend, special_tokens=named, eos_ids=eos_ids)

    @property
    def definition(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return self._backend.to_str()

    def find(self, token: str | None) -> int | None:
        """The id of a token by its exact spelling."""
        return None if token is None else self._backend.token_to_id(token)

    def knows(self, id: int) -> bool:
        """Whether there is a token of that id: a model's table is often larger than its tokenizer's, with gaps."""
        return 0 <= id < self.size and self._backend.id_to_token(id) is not None

    def encode(self, text: str, *, special: bool = True, longest: int | None = None) -> list[int]:
        """Token ids. `special` adds what the file's post-processor adds (BOS, [CLS], ...).

        `longest` cuts the text's own tokens so that the whole, special ones included, has at most so many.
        Raises `InvalidRequest` for text that is not valid Unicode (lone surrogates).
        """
        (ids,) = self.encode_many([text], special=special, longest=longest)
        return ids

    def encode_many(self, texts: Sequence[str], *, special: bool = True, longest: int | None = None) -> list[list[int]]:
        """`encode` of each text. The library's own threads share them, and leave the interpreter's lock to others."""
        whole = longest is None
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=special and whole)
        except TypeError as error:  # what the library says to a str that is no Unicode text
            raise InvalidRequest("The text holds a lone surrogate and is not valid Unicode.") from error
        if longest is not None:
            added = self._backend.num_special_tokens_to_add(is_pair=False) if special else 0
            for encoding in encodings:
                encoding.truncate(max(longest - added, 0))
            if special:
                encodings = [self._backend.post_process(encoding, None, True) for encoding in encodings]
        return [encoding.ids for encoding in encodings]

    def encode_pair(self, first: str, second: str, longest: int | None = None) -> tuple[list[int], list[int]]:
        """Token ids of two texts as the model reads a pair, and which of the two each belongs to (0 or 1).

        `longest` cuts the second text so that the whole has at most so many.
        """
        try:
            encodings = self._backend.encode_batch([first, second], add_special_tokens=False)
        except TypeError as error:
            raise InvalidRequest("The text holds a lone surrogate and is not valid Unicode.") from error
        if longest is not None:
            added = self._backend.num_special_tokens_to_add(is_pair=True)
            encodings[1].truncate(max(longest - added - len(encodings[0].ids), 0))
        whole = self._backend.post_process(*encodings, True)
        return whole.ids, whole.type_ids

    def name(self, id: int) -> str:
        """How the vocabulary writes a token; "" if there is none of that id."""
        return self._backend.id_to_token(id) or ""

    def count_at_least(self, text: str) -> int:
        """A number of tokens that `text` surely has, found without encoding it; 0 when nothing is sure."""
        if not self._longest:
            return 0
        return len(text.encode(errors="ignore").translate(None, self._dropped)) // self._longest

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """The text of the ids; bytes that are no valid UTF-8 become U+FFFD. Unknown ids have no text."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for inside a text, special tokens by their spelling; b"" if unknown."""
        piece = self._pieces.get(id)
        if piece is None:
            piece = self._pieces[id] = self._spell(id)
        return piece

    def _spell(self, id: int) -> bytes:
        if not self.knows(id):
            return b""
        token = self._backend.id_to_token(id)
        if self.byte_level:
            try:
                return bytes(BYTE_OF[character] for character in token)
            except KeyError:
                return token.encode()
        if id in self.byte_ids:
            return bytes([int(token[3:5], 16)])
        before = self.decode(self._anchor, skip_special=False)
        return self.decode([*self._anchor, id], skip_special=False)[len(before) :].encode()


def decoder_steps(decoder: dict[str, Any] | None) -> list[str]:
    """The types of a tokenizer.json's decoders, in order."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in decoder_steps(inner)]
    return [decoder["type"]]


def byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet of GPT-2 (Radford et al. 2019): printable bytes stand for themselves, the other 68
    are moved in order to the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


BYTE_OF = byte_alphabet()


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a configuration file: entries `..._token`, each a string or {"content": string}."""
    entries = {name: value for name, value in config.items() if name.endswith("_token")}
    plain = {name: value.get("content") if isinstance(value, dict) else value for name, value in entries.items()}
    return {name: value for name, value in plain.items() if isinstance(value, str)}


def token_ids(value: Any) -> list[int]:
    """A configuration's `..._token_id`: absent, one id, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int) and not isinstance(id, bool)]
