"""The instances behind one HTTP server: which prompt goes to which, and on when one is lost."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import zmq.asyncio

from engine.api.types import RequestError
from engine.control.messages import (
    Cancel,
    Message,
    PrefillRequest,
    PrefillResult,
    Refused,
    Results,
    Snapshot,
    Submit,
    Watch,
)
from engine.schedule.cost import PromptCost
from engine.serve.engine_client import EngineClient
from engine.serve.health import takes_prompts
from engine.serve.notices import InstanceBack, InstanceLost, Notice

log = logging.getLogger(__name__)

_WATCH_S = 1.0
# So many questions in a row without an answer: the controller is called silent.
_SILENT = 5
# Of those that stay silent, every so many seconds only: what is asked waits for them in a queue.
_RARELY = 10
# A prompt that was in the hands of so many instances as they were lost may be why.
_MOST_LOSSES = 3


@dataclass(eq=False)
class _Job:
    """A prompt until it has its result. refused_by: instances that take no more prompts."""

    request: PrefillRequest
    work: int
    done: asyncio.Future[PrefillResult]
    submitted: float
    moved: bool = False
    abandoned: bool = False
    losses: int = 0
    refused_by: set[int] = field(default_factory=set)

    def finish(self, result: PrefillResult) -> None:
        if self.moved:  # all of its time counts, not that at the last instance alone
            waited = time.monotonic() - self.submitted - result.compute_s
            result = msgspec.structs.replace(result, queue_s=max(0.0, waited))
        self.done.set_result(result)


class Member:
    """An instance as the fleet sees it.

    gone: the supervisor says so. silent: it does not answer, and may again. snapshot: the last
    one. work: what its prompts are predicted to take, see PromptCost.
    """

    def __init__(self, index: int, address: str, on_message: Callable[[int, Message], None]):
        self.index = index
        self.client = EngineClient(address, lambda message: on_message(index, message))
        self.gone = False
        self.silent = False
        self.unanswered = 0
        self.snapshot: Snapshot | None = None
        self.work = 0
        self.last_turn = 0
        self.jobs: dict[int, _Job] = {}  # by the key that the controller knows

    @property
    def alive(self) -> bool:
        return not self.gone and not self.silent

    @property
    def welcoming(self) -> bool:
        """It said that it computes what it gets now."""
        return takes_prompts(self.snapshot)

    def take(self, key: int, job: _Job) -> None:
        self.jobs[key] = job
        self.work += job.work

    def give_back(self, key: int) -> _Job | None:
        job = self.jobs.pop(key, None)
        if job is not None:
            self.work -= job.work
        return job


class Fleet:
    """Used from one event loop, as an async context manager.

    Each prompt, also those of one request, goes by itself to the instance with the least
    predicted work left; of those alike, to that whose last turn is longest ago. Instances that are
    not ready get prompts only when none is. One instance alone is never given up for its silence.
    """

    def __init__(self, addresses: Sequence[str], cost: PromptCost) -> None:
        self.members = [Member(i, address, self._hear) for i, address in enumerate(addresses)]
        self._cost = cost
        self._keys = itertools.count()
        self._turns = itertools.count(1)

    async def __aenter__(self) -> "Fleet":
        self._context = zmq.asyncio.Context()
        for member in self.members:
            member.client.open(self._context)
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watcher.cancel()
        for member in self.members:
            member.client.close()
        with suppress(asyncio.CancelledError):
            await self._watcher
        self._context.term()

    async def prefill(
        self, requests: Sequence[PrefillRequest], abandoned: Callable[[], object] | None = None
    ) -> list[PrefillResult]:
        """The results of `requests`, in their order; the keys that they come with do not matter.

        When the caller is cancelled, what has not started is withdrawn, and `abandoned` is called
        once nobody works on any of them any more. Raises RequestError (503) when a controller
        refuses them, or when no instance is left.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        jobs = [
            _Job(request, self._cost.of(len(request.token_ids)), loop.create_future(), now)
            for request in requests
        ]
        everything = asyncio.gather(*(job.done for job in jobs), return_exceptions=True)
        try:
            self._assign(jobs)
            await asyncio.shield(everything)
        except asyncio.CancelledError:
            if abandoned is not None:
                everything.add_done_callback(lambda _: abandoned())
            self._withdraw(jobs)
            raise
        return [job.done.result() for job in jobs]

    async def snapshots(self, timeout_s: float) -> list[Snapshot | None]:
        """How each instance stands; None for those that are gone or do not say so in time."""

        async def ask(member: Member) -> Snapshot | None:
            return await member.client.snapshot(timeout_s) if member.alive else None

        return await asyncio.gather(*map(ask, self.members))

    def notice(self, notice: Notice) -> None:
        """Takes the supervisor's word."""
        if not 0 <= notice.index < len(self.members):
            log.warning("there is no instance %d", notice.index)
            return
        member = self.members[notice.index]
        match notice:
            case InstanceLost() if not member.gone:
                member.gone = True
                member.client.close()
                self._lose(member, "it is gone")
            case InstanceBack():
                if member.gone:
                    member.client.open(self._context)
                member.gone = member.silent = False
                member.unanswered = 0
                member.client.send(Watch())
                log.info("instance %d is back", member.index)

    def _choose(self, job: _Job) -> Member | None:
        there = [m for m in self.members if m.alive and m.index not in job.refused_by]
        return min(there, key=lambda m: (not m.welcoming, m.work, m.last_turn), default=None)

    def _assign(self, jobs: Iterable[_Job]) -> None:
        """Sends each to an instance; those that no instance is left for fail."""
        parcels: dict[Member, list[PrefillRequest]] = {}
        for job in jobs:
            member = self._choose(job)
            if member is None:
                job.done.set_exception(
                    RequestError("no instance is running", code="no_instance", status=503)
                )
                continue
            key = next(self._keys)
            member.take(key, job)
            member.last_turn = next(self._turns)
            parcels.setdefault(member, []).append(msgspec.structs.replace(job.request, key=key))
        for member, requests in parcels.items():
            member.client.send(Submit(requests))

    def _withdraw(self, jobs: Sequence[_Job]) -> None:
        leaving = set(jobs)
        for job in leaving:
            job.abandoned = True
        for member in self.members:
            keys = [key for key, job in member.jobs.items() if job in leaving]
            if keys and not member.gone:
                member.client.send(Cancel(keys))

    def _hear(self, index: int, message: Message) -> None:
        member = self.members[index]
        member.unanswered = 0
        if member.silent:
            member.silent = False
            log.info("instance %d answers again", index)
        match message:
            case Results(results):
                self._settle(member, results)
            case Snapshot():
                member.snapshot = message
            case Refused(reason):
                for key in list(member.jobs):
                    if (job := member.give_back(key)) is not None:
                        job.done.set_exception(RequestError(reason, code="refused", status=503))
            case _:
                log.warning("instance %d sent an unexpected %s", index, type(message).__name__)

    def _settle(self, member: Member, results: Sequence[PrefillResult]) -> None:
        """A result of what has meanwhile gone to another instance is passed over."""
        elsewhere = []
        for result in results:
            job = member.give_back(result.key)
            if job is None:
                continue
            if result.refused and not job.abandoned:
                job.refused_by.add(member.index)
                if self._choose(job) is not None:
                    job.moved = True
                    elsewhere.append(job)
                    continue
            job.finish(result)
        self._assign(elsewhere)

    def _lose(self, member: Member, why: str) -> None:
        """Its prompts go to the others, but for KV caches that it may yet write."""
        member.snapshot = None
        keys = [k for k, job in member.jobs.items() if member.gone or job.request.kv_path is None]
        log.warning("instance %d is lost: %s; %d prompts move", member.index, why, len(keys))
        moving = []
        for key in keys:
            job = member.give_back(key)
            assert job is not None
            job.losses += member.gone
            if job.abandoned:
                job.finish(PrefillResult(key, error="cancelled", refused=True))
            elif job.losses >= _MOST_LOSSES:
                error = f"given up: {_MOST_LOSSES} instances that worked on it were lost"
                job.finish(PrefillResult(key, error=error))
            else:
                job.moved = True
                moving.append(job)
        if keys and not member.gone:
            member.client.send(Cancel(keys))  # it may wake up, and need not compute them then
        self._assign(moving)

    async def _watch(self) -> None:
        """Counts questions rather than seconds: after a pause of this process answers wait too."""
        while len(self.members) > 1:
            for member in self.members:
                if member.gone:
                    continue
                if member.unanswered == _SILENT:
                    member.silent = True
                    self._lose(member, f"no answer for {_SILENT * _WATCH_S:.0f} s")
                if member.unanswered < _SILENT or member.unanswered % _RARELY == 0:
                    member.client.send(Watch())
                member.unanswered += 1
            await asyncio.sleep(_WATCH_S)
