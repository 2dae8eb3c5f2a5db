"""The ranks of a topology, started as for a launch, with the entries of a self-test."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import zmq

from engine.errors import RunError
from engine.launch.host import LocalHost
from engine.launch.plan import Plan
from engine.launch.ranks import Ranks
from engine.launch.supervisor import Supervisor
from engine.selftest.messages import (
    Account,
    Accounted,
    Answers,
    Exchanged,
    Here,
    Measure,
    Measured,
    Operators,
    Order,
    TryOperators,
)
from engine.selftest.messages import Exchange as ExchangeOrder
from engine.selftest.report import Exchange, Pair, RankOperators, Report
from engine.topology.ranks import RankId, Role

ENTRIES: Mapping[Role, str] = {
    "attention": "engine.selftest.attention:main",
    "expert": "engine.selftest.expert:main",
}
_POLL_S = 0.2

OnStep = Callable[[str], None]
Kind = TypeVar("Kind", Here, Operators, Exchanged, Measured, Accounted)


def try_ranks(
    plan: Plan,
    report: Report,
    messages: int,
    stall_s: float,
    on_step: OnStep,
    entries: Mapping[Role, str] = ENTRIES,
) -> None:
    """Operators, exchange and times, into `report`. RunError: a rank failed, and why.

    messages: at least that many, over all pairs; each pair has as many. stall_s: how long a rank
    waits for an answer that does not come.
    """
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(f"selftest-{os.getpid()}"))
        context = stack.enter_context(zmq.Context())
        address = f"ipc://{supervisor.folder}/control"
        answers = Answers(context, address)
        stack.callback(answers.close)
        host = LocalHost(plan, supervisor, entries)
        stack.callback(host.close)
        ranks = Ranks(plan, address, lambda _: host)
        ranks.start()
        company = _Company(supervisor, answers, ranks.ids, on_step)
        try:
            company.run(plan, report, messages, stall_s)
        except RunError as error:
            supervisor.fail(error)  # its logs will be kept


class _Company:
    """All ranks, and what to tell them one after another."""

    def __init__(
        self, supervisor: Supervisor, answers: Answers, ids: Sequence[RankId], on_step: OnStep
    ) -> None:
        self._supervisor = supervisor
        self._answers = answers
        self._ids = ids
        self._attention = [id_ for id_ in ids if id_.role == "attention"]
        self._experts = [id_ for id_ in ids if id_.role == "expert"]
        self._on_step = on_step
        answers.watch(supervisor.fileno())

    def run(self, plan: Plan, report: Report, messages: int, stall_s: float) -> None:
        here = self._collect(self._ids, "starting", Here)
        tried = self._ask(self._ids, TryOperators(), "operators", Operators)
        report.operators = [
            RankOperators(str(id_), here[id_].device, tried[id_].results) for id_ in self._ids
        ]
        report.failures += [
            f"{rank.rank}: operator {result.operator} "
            + (result.problem or f"is off by {result.error:.1e}, more than {result.tolerance:.0e}")
            for rank in report.operators
            for result in rank.results
            if not result.good
        ]
        size = plan.tensor_parallel
        self._exchange(report, messages, size, stall_s)
        for first in range(0, len(self._attention), size):
            team = self._attention[first : first + size]
            what = f"taking the time of attention group {first // size}"
            for id_, measured in self._ask(team, Measure(stall_s), what, Measured).items():
                report.pairs += [
                    Pair(
                        id_.rank,
                        pair.expert,
                        round(pair.empty_s * 1e6, 1),
                        round(2 * pair.full_bytes / pair.full_s / 1e9, 3),
                    )
                    for pair in measured.pairs
                ]

    def _exchange(self, report: Report, messages: int, size: int, stall_s: float) -> None:
        pairs = len(self._attention) * len(self._experts)
        count = -(-messages // pairs)
        sent = count * pairs
        order = ExchangeOrder(count, stall_s)
        for id_ in self._experts:
            self._answers.send(id_, order)
        what = f"{sent:,} messages"
        answered = self._ask(self._attention, order, what, Exchanged)
        came = self._ask(self._experts, Account(), what, Accounted)
        good = sum(answer.messages for answer in answered.values())
        items = sum(answer.items for answer in came.values())
        report.exchange = Exchange(sent, good)
        report.failures += [text for answer in answered.values() for text in answer.problems]
        report.failures += [text for answer in came.values() for text in answer.problems]
        if good != sent or items * size != sent:
            report.failures.append(
                f"of {sent} messages, {items * size} came right and {good} were answered right"
            )

    def _ask(
        self, ids: Sequence[RankId], order: Order, what: str, kind: type[Kind]
    ) -> dict[RankId, Kind]:
        for id_ in ids:
            self._answers.send(id_, order)
        return self._collect(ids, what, kind)

    def _collect(self, ids: Sequence[RankId], what: str, kind: type[Kind]) -> dict[RankId, Kind]:
        """An answer of each; looks after the processes meanwhile."""
        found: dict[str, Kind] = {}
        while len(found) < len(ids):
            self._on_step(f"{what}: {len(found)} of {len(ids)} ranks done")
            for title, answer in self._answers.receive(_POLL_S).items():
                if not isinstance(answer, kind):
                    raise RunError(f"{title} answered what was not asked: {type(answer).__name__}")
                found[title] = answer
            self._supervisor.check()
        return {id_: found[str(id_)] for id_ in ids}
