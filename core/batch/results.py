"""What the host learns of a launch of token rows: their tokens, which of them ended, and which failed alone."""

from __future__ import annotations

from polymux.core.batch.depth import DepthModel
from polymux.core.batch.plan import Grant
from polymux.core.batch.scoring import take_scores
from polymux.core.batch.sequence import TokenRow, token_row
from polymux.core.batch.stage import Outcomes, Ticket
from polymux.core.compute.device import HostCopy
from polymux.core.errors import InternalError, PolymuxError
from polymux.core.vocabulary import BranchEnded, Tokens

NOT_FINITE = "the model's output was not finite for this request"


def collect_tokens(ticket: Ticket, depth: DepthModel | None) -> Outcomes:
    """`ticket` is a launch of token rows that the device is through with; `depth` completes their tokens to units."""
    outcomes = Outcomes()
    for grant in ticket.plan.grants:
        done = grant.start + grant.count - len(grant.guesses)
        if done > grant.row.done:
            grant.row.done = done
    if ticket.results is None:
        return outcomes
    copy: HostCopy = ticket.results
    results = {name: tensor.tolist() for name, tensor in copy.read().items()}
    if "scores" in results:
        take_scores(ticket.plan, results)
    finals = [grant for grant in ticket.plan.grants if grant.final]
    guessed = len(finals)
    for place, grant in enumerate(finals):
        row = token_row(grant.row)
        row.pending -= 1
        if row.reason is None and not row.ended.done and not row.job.over:
            if grant.guesses:
                places = [*range(guessed, guessed + len(grant.guesses)), place]
                _take_guessed(row, grant, places, results, outcomes, depth)
            else:
                _take(row, place, results, outcomes, depth)
        elif not results["finite"][place]:  # nobody waits for the row, but its blocks must not be reused
            outcomes.failed.append((row, InternalError(NOT_FINITE)))
        guessed += len(grant.guesses)
    return outcomes


def _take_guessed(
    row: TokenRow,
    grant: Grant,
    places: list[int],
    results: dict[str, list],
    outcomes: Outcomes,
    depth: DepthModel | None,
) -> None:
    """The draws up to the first that its guess did not foresee; what was computed after that is void."""
    taken = 0
    for place, guess in zip(places, [*grant.guesses, None]):
        _take(row, place, results, outcomes, depth)
        if row.reason is not None or row.tokens[-1] != guess:
            break
        taken += 1
    outcomes.guessed += len(grant.guesses)
    outcomes.accepted += taken
    row.job.receipt.guessed_units += len(grant.guesses)
    row.job.receipt.accepted_units += taken
    if row.foresight is not None:
        row.foresight.learn(len(grant.guesses), taken)
        row.scheduled -= len(grant.guesses) - taken
        row.done += taken


def _take(row: TokenRow, place: int, results: dict[str, list], outcomes: Outcomes, depth: DepthModel | None) -> None:
    """The host learns the row's newest token."""
    if not results["finite"][place]:
        row.reason = "error"
        outcomes.failed.append((row, InternalError(NOT_FINITE)))
        return
    request = row.request
    token = results["tokens"][place]
    if request.guide is not None:
        try:
            request.guide.take(token)
        except PolymuxError as error:
            row.reason = "error"
            outcomes.failed.append((row, error))
            return
    if request.watched and not row.watched:
        row.watched = results["watched"][place][: len(request.watched)]
    row.tokens.append(token)
    ended = token in request.stop_ids
    if depth is not None:
        row.further.append(results["further"][place])
        ended = depth.ends(token, row.further[-1])
    if not row.started.done:
        row.started.set()
    if request.logprobs is not None:
        row.logprobs.append(results["logprobs"][place])
        if request.logprobs and not request.publish:
            row.tops.append(_list_tops(results, place, request.logprobs))
    if ended or (request.guide is not None and request.guide.finished):
        row.reason = "stop"
    elif len(row.tokens) - row.prompt_length >= request.max_tokens:
        row.reason = "length"
    if request.publish:
        outcomes.reports.append(_report(row, token, place, results))
        if row.reason is not None:
            outcomes.reports.append(BranchEnded(row.job.id, row.branch, row.reason))
    if row.reason is not None:
        outcomes.ended.append(row)
    row.note_progress()


def _report(row: TokenRow, token: int, place: int, results: dict[str, list]) -> Tokens:
    wanted = row.request.logprobs
    if wanted is None:
        return Tokens(row.job.id, row.branch, [token])
    top = None
    if wanted:
        top = [_list_tops(results, place, wanted)]
    return Tokens(row.job.id, row.branch, [token], [results["logprobs"][place]], top)


def _list_tops(results: dict[str, list], place: int, count: int) -> list[tuple[int, float]]:
    """The best `count` tokens of one draw, with their logprobs."""
    return list(zip(results["top_tokens"][place][:count], results["top_logprobs"][place][:count]))
