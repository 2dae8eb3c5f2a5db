"""The load that policies are compared under, on a running instance."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.bench.control_target import ControlTarget
from engine.bench.load import Outcome, offer
from engine.bench.summary import Summary, summarize
from engine.bench.workload import PromptPool
from engine.control.client import Client
from engine.control.messages import TraceReport
from engine.errors import RunError
from engine.traffic.arrivals import Arrival, poisson
from engine.traffic.lengths import Lengths

_ANSWER_S = 15.0
_IDLE_S = 120.0
_IDLE_POLL_S = 0.05
_WARMING = 4  # prompts


@dataclass(frozen=True)
class Load:
    """Prompts that come for `seconds`. slo_s: the TTFT that counts as good."""

    seconds: float
    lengths: Lengths
    slo_s: float
    vocabulary: int

    def run(self, client: Client, rate: float, seed: int, trace_s: float = 0.0) -> Summary:
        """The same seed gives the same prompts in the same order at every rate. Prompts that are
        not there 2 * slo_s after the last one came are given up. trace_s: how many seconds to
        record, from the middle on: see `trace_of`.

        Waits until the instance is idle. Raises RunError for a prompt that fails.
        """
        arrivals = poisson(rate, self.lengths, seed, duration_s=self.seconds)
        outcomes = self._offer(client, arrivals, 2 * self.slo_s, trace_s)
        _until_idle(client)
        return summarize(outcomes, self.slo_s)

    def warm_up(self, client: Client) -> None:
        """What comes first on an instance takes longer."""
        self.time_at_once(client, round(self.lengths.mean), _WARMING)

    def time_at_once(self, client: Client, tokens: int, count: int = 1) -> float:
        """Mean TTFT in seconds of `count` prompts that an instance gets at once."""
        arrivals = [Arrival(0.0, tokens)] * count
        outcomes = self._offer(client, arrivals, _IDLE_S)
        return sum(each.ttft_s for each in outcomes) / count

    def _offer(
        self, client: Client, arrivals: Sequence[Arrival], patience_s: float, trace_s: float = 0.0
    ) -> list[Outcome]:
        pool = PromptPool(max(each.tokens for each in arrivals), self.vocabulary)

        async def drive() -> list[Outcome]:
            async with ControlTarget(client, pool.prompt) as target:
                if trace_s:
                    middle = arrivals[-1].at_s / 2
                    asyncio.get_running_loop().call_later(middle, target.start_trace, trace_s)
                return await offer(arrivals, target, patience_s=patience_s)

        outcomes = asyncio.run(drive())
        for each in outcomes:
            if not (each.answered or each.given_up):
                raise RunError(f"a load cannot be measured where prompts fail: {each.error}")
        return outcomes


def trace_of(client: Client, trace_s: float) -> TraceReport:
    """What was recorded during the last load."""
    report = client.await_trace(trace_s + _ANSWER_S)
    if report is None:
        raise RunError("the instance did not answer with a trace")
    return report


def _until_idle(client: Client) -> None:
    """What was given up while it ran still runs to its end."""
    deadline = time.monotonic() + _IDLE_S
    while (snapshot := client.fresh_snapshot(_ANSWER_S)) is not None:
        if not snapshot.waiting and not snapshot.running:
            return
        if time.monotonic() > deadline:
            break
        client.receive(_IDLE_POLL_S)
    raise RunError(f"the instance was not idle {_IDLE_S:g} s after a load")
