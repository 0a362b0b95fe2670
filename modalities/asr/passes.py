"""The two passes that every way of transcribing is made of, as a job runs them."""

from __future__ import annotations

import os
from typing import Any

from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.holding import Holding
from polymux.core.cache.prefix import root_digest
from polymux.core.engine.job import Job
from polymux.core.tasks import Sampling


def start_encoder(job: Job, stage: OneShotStage, item: Any, *, urgent: bool = False) -> OneShotRow:
    """One window; once the row ended, its `holding` is the window's slab, and the job's."""
    row = OneShotRow(job, item, 1)
    row.keeps, row.urgent = True, urgent
    return job.start(stage, row)


def start_decoder(
    job: Job, stage: TokenStage, request: TokenRequest, slab: Holding, *, urgent: bool = False
) -> TokenRow:
    row = TokenRow(job, request)
    row.reads, row.urgent = [slab], urgent
    job.receipt.input_units += len(request.prompt)
    return job.start(stage, row)


def salt_window(reference: str) -> bytes:
    """A new root of the digests of what is said about a window: the decoder's own cache depends on what it hears.

    Nobody else hears this window, not even who sends the same sound again: naming its content would mean to hash it.
    """
    return root_digest(reference, os.urandom(16).hex())


def peek(prompt: list[int], salt: bytes, **wanted: Any) -> TokenRequest:
    """One greedy token, seen by the program alone."""
    return TokenRequest(
        prompt=prompt, max_tokens=1, sampling=Sampling(temperature=0.0), salt=salt, publish=False, **wanted
    )
