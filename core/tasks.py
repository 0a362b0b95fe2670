"""The built-in tasks: what each one asks and what it answers, independent of any wire format.

The gateway turns HTTP into these Structs and their answers back into HTTP; a modality's front turns an ask into
engine work and engine events into answers. Neither knows the other.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polymux.core.arrival import ArrivingFile
from polymux.core.vocabulary import Receipt, Task, Usage


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a token is drawn. The draw of a row depends only on (seed, position), never on its neighbours."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None


class Format(msgspec.Struct, frozen=True):
    """What an answer must look like. `kind`: schema, regex, choice (a list of texts) or grammar (Lark or GBNF)."""

    kind: str
    value: Any


class Chat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A conversation to continue. `messages` are OpenAI-shaped, validated by the gateway."""

    messages: list[dict[str, Any]]
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: off. k >= 0: the chosen token's logprob and the k best alternatives."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    """auto, none, required: call at least one."""
    tool: str | None = None
    """The one tool to call, whatever `tool_choice` says."""
    parallel_calls: bool = True
    """Whether one answer may call several tools."""
    template_options: dict[str, Any] = {}
    format: Format | None = None
    """What the answer must look like; a thought before it is free."""
    effort: str | None = None
    """How much to think: none, minimal, low, medium, high, xhigh. None: as the model does by itself."""
    thought_budget: int | None = None
    """Tokens after which a thought is closed."""


class Complete(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Texts or token ids to continue. Choice i*n + j is continuation j of prompt i."""

    prompts: list[str | list[int]]
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = 16
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    format: Format | None = None


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    """One token as the user reads it. `data` are its bytes (a token may end inside a character)."""

    token: str
    logprob: float
    data: bytes = b""
    top: list[TokenLogprob] = []


class TextDelta(msgspec.Struct, omit_defaults=True):
    """New text of choice `index`; deltas joined equal the unary text. `tokens` counts the tokens behind it."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None = None


class ThoughtDelta(msgspec.Struct, omit_defaults=True):
    """More of what choice `index` thinks before it answers."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """Choice `index` calls a tool, its `call`-th: first `id` and `name`, once, then JSON `arguments` in pieces."""

    index: int
    call: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    logprobs: list[TokenLogprob] | None = None


class ChoiceEnded(msgspec.Struct):
    """Choice `index` is complete. `reason`: stop, length, tool_calls or content_filter."""

    index: int
    reason: str
    stop: str | None = None
    """The stop string that ended it."""


class Done(msgspec.Struct, omit_defaults=True):
    """Always the last answer of a task that did not fail."""

    usage: Usage
    receipt: Receipt


class Embed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Texts, token ids or pictures to embed, in order. `dimensions` cuts (Matryoshka) and normalises again."""

    inputs: list[str | list[int] | dict[str, Any]]
    """A picture is a part like those of a chat: {"type": "image_url", "image_url": {"url": ...}}; or a text is."""
    dimensions: int | None = None
    truncate: bool = False
    prompt: str | None = None
    """Which of the model's own prompts comes before every text; None: its default."""


class Vector(msgspec.Struct):
    """The embedding of input `index`: little-endian float32, one value per dimension."""

    index: int
    data: bytes


class Rank(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Pairs of texts to compare: for a reranker, a query and a document each."""

    pairs: list[tuple[str, str]]
    truncate: bool = False
    """Cut a second text that is too long instead of refusing it."""


class Score(msgspec.Struct):
    """How well the texts of pair `index` go together: from 0 to 1."""

    index: int
    score: float


class Tokenize(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A text, or a conversation as the model's template writes it, to spell in the model's tokens."""

    text: str = ""
    chat: Chat | None = None
    special: bool = True
    """Add what the tokenizer adds to a text of its own (BOS, [CLS])."""


class Tokenized(msgspec.Struct):
    """Token ids and what each is called; `longest` is how many the model reads."""

    ids: list[int]
    names: list[str]
    longest: int


class Detokenize(msgspec.Struct):
    """Token ids to read as text."""

    ids: list[int]


class Detokenized(msgspec.Struct):
    text: str


class Progress(msgspec.Struct):
    """Denoising of picture (or clip) `index` has done `step` of `steps` steps."""

    index: int
    step: int
    steps: int


class Transcribe(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A recording to write down in its own language, or, for the task `translate`, in English."""

    audio: bytes | str | ArrivingFile
    """A file's bytes, the path of one that stays until the last answer, or one that still arrives. What it is, its
    content says."""
    language: str | None = None
    """A code (en) or a name (english); None: detected."""
    prompt: str = ""
    """Text as if it came before: names, spelling, style."""
    temperature: float = 0.0
    """0: the likeliest text, and draws at rising temperatures where that one cannot be trusted."""
    hotwords: str = ""
    """Words to expect, in every part of the recording."""
    seek: bool = False
    """Write down one part after another, each from where the last one's timestamps end; otherwise the recording is cut
    where nobody speaks, and many parts are written down at once."""
    remembers: bool = False
    """With `seek`: what was said is the prompt of what follows."""
    words: bool = False
    """When each word is said is wanted."""
    threshold: float | None = None
    """How likely speech must be to count. None, here and below: the detector's default."""
    silence: float | None = None
    """Seconds of silence that end an utterance."""
    padding: float | None = None
    """Seconds that are kept before an utterance."""
    beam_size: int = 1
    """Texts that are followed at once at temperature 0 (beam search), the surest of which counts."""
    best_of: int | None = None
    """Texts that are drawn at a temperature above 0, the surest of which counts."""


class HeardWord(msgspec.Struct, array_like=True):
    """When a word was said, in seconds from the start of the recording."""

    text: str
    start: float
    end: float


class Segment(msgspec.Struct):
    """A stretch of speech, in seconds from the start of the recording; texts joined equal the joined `TextDelta`s."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    seek: int
    """Where the window it was heard in begins, in hundredths of a second."""
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[HeardWord] = []
    """Empty where nobody asked for them."""


class Reached(msgspec.Struct):
    """How much of the recording is written down, in seconds from its start."""

    seconds: float


class Heard(msgspec.Struct):
    """The recording as a whole, before `Done`. `language` is its English name; `seconds` how long it lasts."""

    language: str
    seconds: float


class Turns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When somebody begins and ends to speak, as a voice activity detector hears it."""

    threshold: float = 0.5
    """From 0 to 1: how sure it must be that this is speech."""
    prefix_ms: int = 300
    """Sound before the speech that belongs to it."""
    silence_ms: int = 500
    """Silence that ends it."""


class Listen(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Speech to write down while it lasts. The sound follows as messages (`Answers.post`), until `Leave`.

    Another ask (`Answers.amend`) changes how what is not yet committed is heard.
    """

    language: str | None = None
    prompt: str = ""
    turns: Turns | None = None
    """None: the caller says where an utterance ends."""


class Hear(msgspec.Struct, tag="hear"):
    """The next samples: float32, one channel, `LISTEN_RATE` a second."""

    samples: np.ndarray


class Commit(msgspec.Struct, tag="commit"):
    """The utterance ends here: answered by `Committed`, or by `Uncommitted` when there is none."""


class Clear(msgspec.Struct, tag="clear"):
    """Forget the utterance that is under way: answered by `Cleared`."""


class Leave(msgspec.Struct, tag="leave"):
    """No sound follows. The job ends once all that was committed is written down."""


ListenMessage = Hear | Commit | Clear | Leave
LISTEN_RATE = 16_000


class SpeechStarted(msgspec.Struct):
    """Utterance `index` has begun, `seconds` into all sound so far; its prefix counts as its own."""

    index: int
    seconds: float


class SpeechStopped(msgspec.Struct):
    """Its silence was long enough; a `Committed` follows."""

    index: int
    seconds: float


class Committed(msgspec.Struct):
    """Utterance `index` is complete and lasts `seconds`; what it says follows, if it was not told already."""

    index: int
    seconds: float
    asked: bool = False
    """By `Commit`, rather than by silence."""


class Uncommitted(msgspec.Struct):
    """There was nothing to commit: only `seconds` of sound, or of it no speech."""

    seconds: float


class Cleared(msgspec.Struct):
    """The utterance that was under way, if any, is forgotten."""


class Listened(msgspec.Struct):
    """So many `seconds` of all the sound are dealt with, told about once a second: more than that waits."""

    seconds: float


class Understood(msgspec.Struct):
    """All of utterance `index`: its `TextDelta`s joined are `text`, which is empty where nobody spoke."""

    index: int
    text: str
    seconds: float


class Speak(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A text to say aloud. How the sound is encoded is the caller's matter: the answers are samples."""

    text: str
    voice: str | None = None
    """A name that the model lists, or one that `core.text.voices` knows; None: the model's default."""
    speed: float = 1.0
    """0.25 to 4 times the voice's own pace, at the same pitch."""
    kind: str = "text"
    """What `text` is: text, ssml (the elements that `core.text.ssml` knows) or phonemes in the voice's own alphabet."""
    seed: int | None = None
    """Of what is drawn; the same seed gives the same sound. None: drawn, where the voice draws at all."""


class SpokenWord(msgspec.Struct, array_like=True):
    """When a word is said, in seconds from the beginning of the whole sound. `text` has the spacing that follows."""

    text: str
    start: float
    end: float


class Sound(msgspec.Struct):
    """The next stretch of sound, one channel; stretches joined are the whole. Told as soon as it is known."""

    data: bytes
    """Little-endian int16."""
    rate: int
    """Samples a second, the same for all stretches of one answer."""
    words: list[SpokenWord] = []
    """Words that begin in this stretch, in order; empty where the voice cannot tell. Joined over an answer, their
    texts are the text that was said."""


class Paint(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Pictures to make of a text. What is None is the model's default; how a picture is encoded is the caller's."""

    prompt: str
    negative: str | None = None
    """What to keep away from; with `true_scale`."""
    n: int = 1
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    """How closely to follow the text: the scale that a guidance-distilled model reads, of any other the scale of
    classifier-free guidance."""
    true_scale: float | None = None
    """Of classifier-free guidance with the negative prompt, which computes every step twice."""
    seed: int | None = None
    """Picture k of n is the one that n=1 makes with seed + k. None: drawn."""
    source: bytes | None = None
    """A picture file to start from."""
    mask: bytes | None = None
    """A picture file of the same size: what is transparent in it is painted anew, the rest is kept."""
    strength: float | None = None
    """How much of `source` may change, up to 1. None: all where a mask says where, else most."""
    previews: int = 0
    """Looks at each picture while it is made, evenly apart."""
    quality: str | None = None
    """A preset that trades exactness for time: exact, balanced, fast. None: what the operator set."""
    strict: bool = False
    """Every bit the same whatever else runs, at the price of batching."""


class Preview(msgspec.Struct):
    """The `number`-th look at picture `index` while it is made: small, RGB bytes row by row from the top."""

    index: int
    number: int
    width: int
    height: int
    data: bytes
    of_width: int = 0
    """Of the picture itself."""
    of_height: int = 0


class Film(Paint, kw_only=True, omit_defaults=True):
    """A clip to make of a text, or of a text and the picture it begins with (`source`)."""

    frames: int | None = None


class Clip(msgspec.Struct):
    """Clip `index`: `frames` are (frames, height, width, 3) uint8, `rate` of them a second; `seed` makes it again."""

    index: int
    seed: int
    rate: int
    frames: np.ndarray


class Picture(msgspec.Struct):
    """Picture `index`: `data` are RGB bytes, row by row from the top; `seed` makes it again."""

    index: int
    seed: int
    width: int
    height: int
    data: bytes


CHAT = Task("chat", Chat, (TextDelta, ThoughtDelta, CallDelta, ChoiceEnded, Done))
COMPLETE = Task("complete", Complete, (TextDelta, ChoiceEnded, Done))
EMBED = Task("embed", Embed, (Vector, Done))
RANK = Task("rank", Rank, (Score, Done))
TOKENIZE = Task("tokenize", Tokenize, (Tokenized, Done))
DETOKENIZE = Task("detokenize", Detokenize, (Detokenized, Done))
TRANSCRIBE = Task("transcribe", Transcribe, (TextDelta, Segment, Reached, Heard, Done))
TRANSLATE = Task("translate", Transcribe, (TextDelta, Segment, Reached, Heard, Done))
LISTEN = Task(
    "listen",
    Listen,
    (SpeechStarted, SpeechStopped, Committed, Uncommitted, Cleared, Listened, TextDelta, Understood, Done),
)
SPEAK = Task("speak", Speak, (Sound, Done))
IMAGE = Task("image", Paint, (Progress, Preview, Picture, Done))
VIDEO = Task("video", Film, (Progress, Preview, Clip, Done))

BUILT_IN = (CHAT, COMPLETE, EMBED, RANK, TOKENIZE, DETOKENIZE, TRANSCRIBE, TRANSLATE, LISTEN, SPEAK, IMAGE, VIDEO)
