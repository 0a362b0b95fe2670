"""A decoder's stage on a simulated device: the real lane plans, a clock that is not ours says how long a launch takes.

What arrivals of a day would meet is known in a second, without a card: when each request gets its first token, and how
long its others are apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.row import Row
from polymux.core.batch.scheduler import Scheduler
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.cache.arena import Arena
from polymux.core.compute.device import Device
from polymux.core.engine.job import Job, JobHost


@dataclass(frozen=True)
class Request:
    """When it comes, in milliseconds, and how many tokens it brings and wants; so many of them are `cached`."""

    at: float
    prompt: int
    answer: int
    cached: int = 0


@dataclass
class Served:
    """When a request's tokens came, in milliseconds."""

    request: Request
    times: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.times[0] - self.request.at

    @property
    def between(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:])]


@dataclass(frozen=True)
class SimulatedDecoder:
    """Milliseconds of a launch. On the card: it reads the weights or multiplies by them, whichever takes longer; it
    reads keys and values; and prompts attend to what they have before them. Products are made in tiles of so many
    tokens. On the host: much where a launch with prompts is not recorded."""

    weights: float
    fixed: float
    """Of a launch with long work, besides its tokens: the last waves of its products, and what lies between them."""
    token: float
    """Of products, a token."""
    read: float
    """Of keys and values, a token of a row's context."""
    attend: float
    """Of a prompt's attention, a token and thousand tokens before it."""
    tile: int = 1
    launch: float = 0.0
    """Of the host, planning included."""
    recorded: int = 1 << 30
    """Tokens up to which launches with prompts are recorded."""
    kernels: float = 0.0
    """Of the host, where they are not."""
    streams: float = 0.0
    """What it takes more then, if rows bring single tokens as well."""

    def host(self, plan: Plan) -> float:
        singles = sum(grant.count == 1 for grant in plan.grants)
        if singles == len(plan.grants) or plan.units <= self.recorded:
            return self.launch
        return self.launch + self.kernels + (self.streams if singles else 0.0)

    def milliseconds(self, plan: Plan) -> float:
        tokens = -(-sum(grant.count for grant in plan.grants) // self.tile) * self.tile
        seen = sum(grant.start + grant.count for grant in plan.grants)
        long = sum(grant.count * (grant.start + grant.count / 2) for grant in plan.grants if grant.count > 1)
        return max(self.weights, self.fixed + self.token * tokens) + self.read * seen + self.attend * long / 1e3


QWEN3_8B_H200 = SimulatedDecoder(
    weights=4.6,
    fixed=1.2,
    token=0.0163,
    read=4e-5,
    attend=0.0018,
    tile=128,
    launch=0.8,
    recorded=2048,
    kernels=11.0,
    streams=4.0,
)
"""Fitted to `benchmarks/gpu/mixed.py` and `attention.py` on a card: beside attention 9.6 ms for 512 tokens, 17.7 for
1,024, 34.2 for 2,048 and 68 for 4,096, and 4.0 ms of attention in a prompt of 2,016; 11 ms of the host where kernels
are launched one by one, 15 beside streams."""


class SimulatedRow(Row):
    """A prompt, then tokens one at a time."""

    def __init__(self, job: Job, served: Served) -> None:
        super().__init__(job)
        self.served = served
        self.scheduled = self.done = served.request.cached
        self.drawn = 0
        """Tokens whose launch is out."""

    @property
    def missing(self) -> int:
        """Tokens that exist on the device and are not computed; none once all are drawn."""
        request = self.served.request
        return request.prompt + self.drawn - self.scheduled if self.drawn < request.answer else 0


class SimulatedStage(Stage):
    """As a token stage behaves, without tokens."""

    name = "decode"

    def __init__(self, max_rows: int, max_units: int, least_units: int, grain: int) -> None:
        self.max_rows, self.max_units, self.least_units, self.grain = max_rows, max_units, least_units, grain

    def want(self, row: Row) -> int:
        return _simulated(row).missing

    def grant(self, row: Row, units: int) -> Grant:
        grant = super().grant(row, units)
        grant.final = _simulated(row).missing == 0
        _simulated(row).drawn += grant.final
        return grant

    def launch(self, plan: Plan) -> Ticket:
        return Ticket(plan)

    def collect(self, ticket: Ticket) -> Outcomes:
        return Outcomes()


def _simulated(row: Row) -> SimulatedRow:
    if not isinstance(row, SimulatedRow):
        raise TypeError(f"a simulated stage was given a {type(row).__name__}")
    return row


def simulate(
    requests: Sequence[Request],
    card: SimulatedDecoder,
    *,
    slice_ms: float,
    max_rows: int = 256,
    max_units: int = 4096,
    least_units: int = 64,
    grain: int = 1,
    depth: int = 2,
) -> list[Served]:
    """Serves the requests as the loop does: `depth` launches are out, and a launch is planned before the host has seen
    the one before. A recorded launch begins when the host has sent it, another with its first kernel, and it ends no
    sooner than the last is sent."""
    stage = SimulatedStage(max_rows, max_units, least_units, grain)
    scheduler = Scheduler([stage], Arena(1 << 16, Device().torch, 1 << 16), slice_ms)
    lane = scheduler.lane(stage)
    host = JobHost(scheduler.enqueue, lambda stage, row: None)
    served = [Served(request) for request in sorted(requests, key=lambda request: request.at)]
    coming = deque(served)
    inflight: deque[tuple[Plan, float, float]] = deque()
    now = free = collected = 0.0

    def collect() -> None:
        nonlocal now, collected
        plan, launched, ended = inflight.popleft()
        now = max(now, ended)
        lane.charge(now - max(launched, collected), plan)
        collected = now
        for grant in plan.grants:
            row = _simulated(grant.row)
            row.done = grant.start + grant.count
            if grant.final:
                row.served.times.append(now)
            if len(row.served.times) == row.served.request.answer:
                lane.withdraw(row)
            lane.settle(row)

    while coming or inflight or lane.waiting or lane.running:
        while coming and coming[0].request.at <= now:
            each = coming.popleft()
            scheduler.enqueue(stage, SimulatedRow(Job(host, str(len(coming)), "chat"), each))
        planned = scheduler.plan()
        if planned is not None:
            launched, now = now, now + card.host(planned[1])
            free = max(max(free, launched + card.launch) + card.milliseconds(planned[1]), now)
            inflight.append((planned[1], launched, free))
        elif not inflight:
            now = max(now, coming[0].request.at)
        while len(inflight) > (depth - 1 if planned is not None else 0):
            collect()
    return served


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
