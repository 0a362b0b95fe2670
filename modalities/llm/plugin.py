"""Text generation and text embedding, registered like a stranger's plugin: cheap to import, torch only on load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polymux.core.hooks import hookimpl
from polymux.core.imports import importing
from polymux.core.pipeline import Front, Pipeline, Program
from polymux.core.plugins import Example
from polymux.core.stopwatch import part

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

POLYMUX_API_LEVEL = 1

TOWERS = ("vision_config", "audio_config", "text_config", "codec_config", "encoder", "decoder", "speech")
"""Keys of config.json whose objects describe a second stack of layers: another modality's model."""


def reads_text_only(config: Mapping[str, Any]) -> bool:
    """Whether the model is one stack over token ids: no second tower, no encoder beside the decoder."""
    towers = any(isinstance(config.get(key), dict) for key in TOWERS)
    return "vocab_size" in config and not towers and not config.get("is_encoder_decoder", False)


class TextGeneration(Pipeline):
    """Decoder language models: chat and completions."""

    name = "text-generation"
    tasks = ("chat", "complete", "tokenize", "detokenize")

    def accepts(self, files: ModelFiles) -> bool:
        """A decoder (`...ForCausalLM`, `...LMHeadModel`) that its authors did not publish as an embedder."""
        config = files.config()
        decoder = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.get("architectures") or ())
        return decoder and reads_text_only(config) and not files.has("modules.json")

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.core.generation.front import GenerateFront

        return GenerateFront.load(files, options)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.core.compute.weights import read_ahead

        reading = read_ahead(files.folder, site.device.torch)
        with part("imports of the model"), importing():  # transformers: the weights are there before it is
            from polymux.core.generation.program import load_generation

        return load_generation(files, site, options, reading)


class TextEmbedding(Pipeline):
    """Encoders (BERT, XLM-R, ModernBERT, ...) and decoders published as embedders."""

    name = "text-embedding"
    tasks = ("embed", "tokenize", "detokenize")

    def accepts(self, files: ModelFiles) -> bool:
        """A sentence-transformers folder (modules.json), or a bare text model with its tokenizer."""
        config = files.config()
        names = config.get("architectures") or ()
        published = files.has("modules.json")
        bare = any(name.endswith(("Model", "ForMaskedLM")) and not name.endswith("LMHeadModel") for name in names)
        tokenised = files.has("tokenizer.json")
        return reads_text_only(config) and tokenised and (published or bare)

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.modalities.llm.embedding import EmbedFront

        return EmbedFront.load(files, options)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.llm.program import load_embedding

        return load_embedding(files, site, options)


class TextRanking(Pipeline):
    """Cross-encoders (a classifier of one label over two texts), and language models that are told to judge."""

    name = "text-ranking"
    tasks = ("rank", "tokenize", "detokenize")

    def accepts(self, files: ModelFiles) -> bool:
        config = files.config()
        names = config.get("architectures") or ()
        labels = config.get("num_labels") or len(config.get("id2label") or ("", ""))
        classifier = any(name.endswith("ForSequenceClassification") for name in names)
        return classifier and labels == 1 and reads_text_only(config) and files.has("tokenizer.json")

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.modalities.llm.judging import JudgeFront, is_judge
        from polymux.modalities.llm.ranking import RankFront

        return (JudgeFront if is_judge(files.config()) else RankFront).load(files, options)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.llm.program import load_ranking

        return load_ranking(files, site, options)


@hookimpl
def pipelines() -> list[Pipeline]:
    return [TextGeneration(), TextEmbedding(), TextRanking()]


@hookimpl
def examples() -> list[Example]:
    from polymux.modalities.llm.examples import make_examples

    return make_examples()
