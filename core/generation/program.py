"""The engine half of text generation: which stages there are, and how a job walks through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.batch.adapters import AdapterStage, open_adapters
from polymux.core.batch.drafting import open_drafter
from polymux.core.batch.oneshot import OneShotRow
from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.holding import Holding
from polymux.core.cache.prefix import root_digest
from polymux.core.compute.dtype import read_dtype
from polymux.core.compute.load import load_decoder
from polymux.core.compute.weights import Reading
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import ContextTooLong, InternalError, InvalidRequest
from polymux.core.generation.guidance import GrammarStage, open_guide
from polymux.core.generation.work import SCORES, GenerateWork, Guidance, PromptScores
from polymux.core.pipeline import Program
from polymux.core.stopwatch import part
from polymux.core.text.grammar import Grammar, Grammars
from polymux.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles


class GenerationProgram(Program):
    """Continues prompts. The branches of one prompt start when its first has computed the prompt, and share it."""

    def __init__(
        self,
        stage: TokenStage,
        reference: str,
        grammars: GrammarStage | None = None,
        adapters: AdapterStage | None = None,
    ) -> None:
        self.work = {"chat": GenerateWork, "complete": GenerateWork}
        self.stage = stage
        self.stages = tuple(each for each in (stage, grammars, adapters) if each is not None)
        self._reference = reference
        self._grammars = grammars
        self._adapters = adapters

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, GenerateWork):
            raise InvalidRequest("malformed generation work")
        grammar = await self._compile(job, work.guidance)
        adapter = await self._adapt(job, work.adapter)
        if work.score_prompts:
            await self._score(job, work, adapter)
        leaders = [
            job.start(self.stage, self._row(job, work, prompt, 0, grammar, adapter))
            for prompt in range(len(work.prompts))
        ]
        rows = list(leaders)
        for prompt, leader in enumerate(leaders):
            if work.n > 1:
                await leader.started
                rows += [
                    job.start(self.stage, self._row(job, work, prompt, choice, grammar, adapter))
                    for choice in range(1, work.n)
                ]
        for row in rows:
            await row
        job.receipt.input_units = sum(row.prompt_length for row in leaders)
        job.receipt.cached_units = sum(row.cached for row in leaders)
        job.receipt.output_units = sum(len(row.generated) for row in rows)
        job.receipt.preemptions = sum(row.preempted for row in rows)

    def describe(self) -> dict[str, Any]:
        shape = self.stage.model.shape
        return {"dtype": str(shape.dtype).removeprefix("torch."), "context": self.stage.capacity}

    async def _compile(self, job: Job, guidance: Guidance | None) -> Grammar | None:
        if guidance is None or guidance.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("this model was loaded without its tokenizer: it follows no format")
        return (
            self._grammars.find(guidance.grammar)
            or (await job.start(self._grammars, OneShotRow(job, guidance.grammar, 1))).result
        )

    async def _adapt(self, job: Job, name: str | None) -> Holding | None:
        if name is None:
            return None
        if self._adapters is None:
            raise InternalError("this model was loaded without adapters")
        return await self._adapters.fetch(job, name)

    async def _score(self, job: Job, work: GenerateWork, adapter: Holding | None) -> None:
        """Rows that compute all of their prompts, whatever others have left; the answers then start from theirs."""
        rows = []
        for prompt in range(len(work.prompts)):
            row = self._row(job, work, prompt, 0, None, adapter)
            request = replace(row.request, max_tokens=1, logprobs=None, guide=None, scores=work.logprobs or 0)
            row.request = replace(request, publish=False)
            rows.append(job.start(self.stage, row))
        for prompt, row in enumerate(rows):
            await row
            logprobs = [logprob for logprob, _ in row.scores]
            job.emit(SCORES, PromptScores(prompt, logprobs, [best for _, best in row.scores]))

    def _row(
        self,
        job: Job,
        work: GenerateWork,
        prompt: int,
        choice: int,
        grammar: Grammar | None,
        adapter: Holding | None,
    ) -> TokenRow:
        ids = work.prompts[prompt]
        room = self.stage.capacity - len(ids)
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {len(ids)} tokens; this engine's cache holds {self.stage.capacity}", param="messages"
            )
        branch = prompt * work.n + choice
        own = [job.id, str(prompt)] if work.score_prompts else []  # only what is computed is scored
        if self._adapters is not None and work.adapter is not None:
            own.append(self._adapters.digest(work.adapter).hex())
        request = TokenRequest(
            prompt=ids,
            max_tokens=min(work.max_tokens[prompt], room),
            sampling=work.sampling,
            seed=work.seeds[branch],
            stop_ids=frozenset(work.stop_token_ids),
            logprobs=work.logprobs,
            salt=root_digest(self._reference, work.salt, *own),
            guide=open_guide(work, grammar),
        )
        row = TokenRow(job, request, branch)
        if adapter is not None:
            row.adapter, row.reads = adapter, [adapter]
        return row


def load_generation(
    files: ModelFiles, site: Site, options: Mapping[str, Any], reading: Reading | None = None
) -> Program:
    """The program of a model's folder; `reading` is what was begun of its weights."""
    adapters = open_adapters(options.get("adapters", {}))
    decoder = load_decoder(
        files.folder,
        site.device.torch,
        read_dtype(options),
        tier=options.get("tier", "fast"),
        quantization=options.get("quantization"),
        quantizers=site.quantizers,
        adapters=adapters,
        reading=reading,
    )
    with part("tokenizer"):
        grammars = GrammarStage(Grammars(Tokenizer.load(files), decoder.shape.vocabulary), site)
    drafter = open_drafter(options.get("speculation"), decoder, site, site.draftings)
    with part("stage"):
        stage = TokenStage("decode", decoder, site, drafter=drafter)
    served = AdapterStage(decoder.adapters, site) if decoder.adapters is not None else None
    return GenerationProgram(stage, files.reference, grammars, served)
