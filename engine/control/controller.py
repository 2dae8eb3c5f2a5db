"""The controller: admits prompts, has the policy form batches, hands them to attention groups.

State and transitions only, without socket or clock (engine/control/service.py has those). It
touches no tensor. What runs where and when is the policy's decision (engine/schedule), what
becomes of the work of a rank that died is `Blame`'s, who has stalled is `Liveness`'s; this module
keeps the accounts and the connections.
"""

import logging
from collections import deque
from dataclasses import dataclass, field

import msgspec

from engine.control.blame import DEATHS_ALONE, Blame, Verdict
from engine.control.liveness import MARGIN, QUIET_S, Liveness
from engine.control.meeting import MeetingPlace
from engine.control.messages import (
    Agreement,
    BatchDone,
    Cancel,
    ClientGone,
    Drain,
    Ended,
    Hello,
    KillRank,
    Message,
    PrefillRequest,
    PrefillResult,
    Progress,
    Quit,
    RankDied,
    RankStatus,
    Ready,
    Record,
    Refused,
    Results,
    Run,
    Snapshot,
    Spans,
    StartTrace,
    StoreAsk,
    StorePut,
    Submit,
    Supervise,
    Watch,
    Welcome,
)
from engine.control.statistics import Statistics
from engine.control.tracing import TraceCollector
from engine.curve import Keys
from engine.schedule.build import Policy
from engine.schedule.cost import PromptCost
from engine.schedule.types import Assignment, Batch, Request
from engine.topology.ranks import RankId

log = logging.getLogger(__name__)

# A rank that has been ready for so long is no rank that cannot live, though it had nothing to do.
_LONG_LIFE_S = 60.0


class ControllerSpec(msgspec.Struct, frozen=True):
    """What the controller needs to know of its instance. remote: where ranks of other nodes come,
    with `keys`. policy: by its name. min_batch_tokens: None where expert ranks measure it.
    """

    address: str
    agreement: Agreement
    ranks: list[RankId]
    groups: int  # of tensor_parallel attention ranks each
    min_batch_tokens: int | None
    max_batch_tokens: int
    exclusive_tokens: int
    max_wait_s: float
    policy: str = "asap"
    chunk_tokens: int = 8192
    in_lockstep: bool = False
    stall_timeout_s: float = 60.0
    ttft_slo_s: float | None = None
    tensor_parallel: int = 1
    cost: PromptCost = PromptCost()
    remote: str | None = None
    keys: Keys | None = None
    paced: str | None = None  # as in Snapshot


@dataclass(slots=True)
class _Rank:
    """The present life of a rank."""

    id: RankId
    peer: bytes | None = None
    pid: int = 0
    ready: bool = False
    load_seconds: float = 0.0
    inflection_tokens: int | None = None
    born: float | None = None  # when its last life ended; None for the first one
    ready_at: float = 0.0
    deaths: int = 0
    progress: Progress | None = None
    killed: bool = False  # KillRank was sent
    innocent: bool = False  # and for no fault of its own or of what it computes


@dataclass(slots=True)
class _Pending:
    client: bytes
    request: PrefillRequest  # under the client's own key
    submitted: float
    started: float = 0.0


@dataclass(slots=True)
class Controller:
    """Messages in, (peer, message) pairs out. Time is an argument: seconds, monotonic."""

    spec: ControllerSpec
    policy: Policy
    machine: str = ""  # whose clock times are on
    statistics: Statistics = field(default_factory=Statistics)
    outbox: deque[tuple[bytes, Message]] = field(default_factory=deque)
    _ranks: dict[tuple[str, int], _Rank] = field(default_factory=dict)
    _by_peer: dict[bytes, _Rank] = field(default_factory=dict)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _keys: dict[tuple[bytes, int], int] = field(default_factory=dict)
    _running: dict[int, tuple[int, Batch]] = field(default_factory=dict)  # batch id -> group, batch
    _fates: dict[int, Verdict] = field(default_factory=dict)  # of batches whose group is to die
    _blame: Blame = field(default_factory=Blame)
    _liveness: Liveness = field(init=False)
    _quiet_s: float = field(init=False)
    _traces: TraceCollector = field(default_factory=TraceCollector)
    _meeting: MeetingPlace = field(default_factory=MeetingPlace)
    _supervisor: bytes | None = None
    _started: bool = False
    _quitting: bool = False
    _ended: bool = False
    _first_run: float | None = None
    _min_batch_tokens: int | None = field(init=False)
    _last_done: float = 0.0
    _next_key: int = 0

    def __post_init__(self) -> None:
        self._ranks = {(id_.role, id_.rank): _Rank(id_) for id_ in self.spec.ranks}
        self._min_batch_tokens = self.spec.min_batch_tokens
        # Who is to be ended after less than that has stalled after less.
        self._quiet_s = min(QUIET_S, self.spec.stall_timeout_s)
        self._liveness = Liveness(self._quiet_s, self.spec.in_lockstep)

    @property
    def ready(self) -> bool:
        return all(rank.ready for rank in self._ranks.values())

    @property
    def running(self) -> int:
        """Prompts that a group has been given and has not answered."""
        return len(self._pending) - self.policy.waiting

    @property
    def busy(self) -> bool:
        """Somebody waits for something, so that time alone may call for action."""
        return bool(self._pending or self._traces) or (self._started and not self.ready)

    def handle(self, peer: bytes, message: Message, now: float) -> None:
        """Takes one message from `peer`; answers, if any, are in `outbox` afterwards."""
        rank = self._by_peer.get(peer)
        if rank is not None:
            self._handle_rank(rank, message, now)
            return
        match message:
            case Hello():
                self._greet(peer, message, now)
            case Supervise():
                self._supervisor = peer
            case RankDied():
                self._bury(message, now)
            case StorePut() | StoreAsk():
                self.outbox.extend(self._meeting.handle(peer, message))
            case ClientGone(identity):
                for client, key in [k for k in self._keys if k[0] == identity]:
                    self._cancel(client, key)
            case _:
                self._handle_client(peer, message, now)

    def schedule(self, now: float) -> float | None:
        """Starts what the policy says, and looks after those that stand still.

        Returns when to call again at the latest, None for never.
        """
        if self.ready and not self._started:
            self._started = True
            self._aggregate()
        if self._started:
            for assignment in self.policy.next(now):
                self._start(assignment, now)
        self._end_stalls(now)
        self.outbox.extend(self._traces.finished(now))
        if self._quitting and not self._pending:
            self._end(None)
        return self.policy.next_deadline(now) if self._started else None

    def snapshot(self, now: float) -> Snapshot:
        elapsed = 0.0
        if self._first_run is not None:
            elapsed = (now if self.running else self._last_done) - self._first_run
        stalled = self._stalled(now)
        ranks = [
            self.statistics.complete_rank(_status(rank, rank.id in stalled), now, elapsed)
            for rank in self._ranks.values()
        ]
        snapshot = Snapshot(
            ready=self.ready,
            waiting=self.policy.waiting,
            running=self.running,
            finished=0,
            failed=0,
            ranks=ranks,
            work=sum(self.spec.cost.of(len(p.request.token_ids)) for p in self._pending.values()),
            quitting=self._quitting,
            problems=self._problems(stalled),
            paced=self.spec.paced,
            min_batch_tokens=self._min_batch_tokens,
        )
        return self.statistics.complete(snapshot, now)

    def _aggregate(self) -> None:
        """Tells the policy what the expert ranks have measured, for as long as the instance lives:
        a rank that is started again changes nothing.
        """
        found = [r.inflection_tokens for r in self._ranks.values() if r.inflection_tokens]
        if self._min_batch_tokens is None and found:
            self._min_batch_tokens = min(max(found), self.spec.max_batch_tokens)
            self.policy.aggregate(self._min_batch_tokens)
            log.info("prompts are aggregated up to %d tokens, as measured", self._min_batch_tokens)

    # --- clients -----------------------------------------------------------------------------

    def _handle_client(self, peer: bytes, message: Message, now: float) -> None:
        match message:
            case Submit(requests):
                for request in requests:
                    self._admit(peer, request, now)
            case Drain():
                self.policy.drain()
            case Watch():
                self.outbox.append((peer, self.snapshot(now)))
            case Cancel(keys):
                for key in keys:
                    self._cancel(peer, key)
            case Quit():
                self._quitting = True
            case StartTrace(seconds):
                there = {r.id: r.peer for r in self._ranks.values() if r.peer is not None}
                self._traces.start(peer, set(there), now, seconds)
                self.outbox.extend((to, Record(seconds)) for to in there.values())
            case _:  # for instance what a rank sent before it died
                log.info("passed over a %s of %r", type(message).__name__, peer)

    def _admit(self, peer: bytes, request: PrefillRequest, now: float) -> None:
        if self._quitting:
            refused = PrefillResult(request.key, error="the instance is stopping", refused=True)
            self.outbox.append((peer, Results([refused])))
            return
        key, self._next_key = self._next_key, self._next_key + 1
        self._pending[key] = _Pending(peer, request, now)
        self._keys[peer, request.key] = key
        self.policy.add(Request(key, len(request.token_ids), now))
        self.statistics.submitted(now)

    def _cancel(self, peer: bytes, client_key: int) -> None:
        key = self._keys.get((peer, client_key))
        if key is None:
            return
        if self.policy.cancel(key):
            self._forget(key)
            cancelled = PrefillResult(client_key, error="cancelled", refused=True)
            self.outbox.append((peer, Results([cancelled])))

    def _forget(self, key: int) -> _Pending:
        pending = self._pending.pop(key)
        self._keys.pop((pending.client, pending.request.key), None)
        self._blame.cleared(key)
        return pending

    def _answer(self, results: list[PrefillResult], now: float) -> None:
        by_client: dict[bytes, list[PrefillResult]] = {}
        for result in results:
            pending = self._forget(result.key)
            queue_s, compute_s = pending.started - pending.submitted, now - pending.started
            failed = result.error is not None
            self.statistics.finished(
                len(pending.request.token_ids), queue_s + compute_s, failed, now
            )
            answer = msgspec.structs.replace(
                result, key=pending.request.key, queue_s=queue_s, compute_s=compute_s
            )
            by_client.setdefault(pending.client, []).append(answer)
        self.outbox.extend((client, Results(mine)) for client, mine in by_client.items())

    # --- ranks -------------------------------------------------------------------------------

    def _handle_rank(self, rank: _Rank, message: Message, now: float) -> None:
        progress = message if isinstance(message, Progress) else None
        self._liveness.heard(rank.id, now, progress)
        match message:
            case Progress():
                rank.progress = message
                self.statistics.progress(rank.id, message, now)
            case BatchDone(batch, results):
                self._finish(batch, results, now)
            case Ready(load_seconds, inflection):
                rank.ready, rank.load_seconds, rank.ready_at = True, load_seconds, now
                rank.inflection_tokens = inflection
                if rank.id.role == "attention":
                    group = rank.id.rank // self.spec.tensor_parallel
                    if all(member.ready for member in self._members(group)):
                        self.policy.recovered(group)
            case Spans(spans):
                self._traces.add(spans, now, self.machine)
            case Hello():  # again, because the answer took long
                self.outbox.append((rank.peer or b"", Welcome()))
            case _:
                log.warning("%s sent an unexpected %s", rank.id, type(message).__name__)

    def _greet(self, peer: bytes, hello: Hello, now: float) -> None:
        rank = self._ranks.get((hello.id.role, hello.id.rank))
        if rank is None:
            self.outbox.append((peer, Refused(f"{hello.id} is not part of this instance")))
        elif rank.id != hello.id:
            # A new life before the news of the old one's death, or the reverse. It asks again.
            log.info("%s came in life %d", hello.id, hello.id.incarnation)
        elif difference := _difference(self.spec.agreement, hello.agreement):
            self.outbox.append((peer, Refused(difference)))
        else:
            rank.peer, rank.pid = peer, hello.pid
            self._by_peer[peer] = rank
            self._liveness.heard(rank.id, now)
            self.outbox.append((peer, Welcome()))

    def _start(self, assignment: Assignment, now: float) -> None:
        if self._first_run is None:
            self._first_run = now
        members = self._members(assignment.group)
        for member in members:
            self._liveness.assigned(member.id, now)
        for lane, batch in enumerate(assignment.batches):
            requests = []
            for segment in batch.segments:
                pending = self._pending[segment.key]
                pending.started = pending.started or now
                requests.append(msgspec.structs.replace(pending.request, key=segment.key))
            self._running[batch.id] = (assignment.group, batch)
            for member in members:
                assert member.peer is not None
                self.outbox.append((member.peer, Run(batch, lane, requests, assignment.step)))

    def _members(self, group: int) -> list[_Rank]:
        """The ranks of an attention group, the one that answers first."""
        size = self.spec.tensor_parallel
        return [self._ranks["attention", group * size + member] for member in range(size)]

    def _finish(self, batch_id: int, results: list[PrefillResult], now: float) -> None:
        group, batch = self._running.pop(batch_id)
        self._fates.pop(batch_id, None)
        self.policy.finished(group, batch_id)
        self._blame.settled(batch)
        self._last_done = now
        self._answer(results, now)

    # --- deaths and stalls -------------------------------------------------------------------

    def _bury(self, death: RankDied, now: float) -> None:
        """A rank died, and its successor is on the way: its work is not lost."""
        old = self._ranks[death.id.role, death.id.rank]
        self._ranks[death.id.role, death.id.rank] = _Rank(
            death.successor, load_seconds=old.load_seconds, born=now, deaths=old.deaths + 1
        )
        if old.peer is not None:
            del self._by_peer[old.peer]
        self._liveness.gone(death.id)
        self._traces.gone(death.id)
        self._meeting.gone(death.id)
        old.innocent = old.innocent or death.collateral
        blamed = [] if old.innocent else self._computed(death)
        work = ", ".join(f"batch {batch.id}" for batch in blamed) or "nothing"
        log.warning("%s died: %s; it computed %s", death.id, death.reason, work)
        proven = death.work_items or (old.ready and now - old.ready_at > _LONG_LIFE_S)
        if not old.innocent and self._blame.hopeless(death.id, bool(proven), *blamed):
            self._end(f"{death.id} died too often without finishing work; last: {death.reason}")
            return
        for batch in blamed:
            verdict = self._blame.judge(batch, company=len(blamed) > 1)
            if verdict is Verdict.AGAIN:
                continue
            self._fates[batch.id] = verdict
            if death.id.role == "expert":
                # The batch has to leave its group. A new life of the group is the surest way.
                first, *_ = self._members(self._running[batch.id][0])
                first.innocent = True
                self._kill(first, f"to take batch {batch.id} from it")
        if death.id.role == "attention":
            group = death.id.rank // self.spec.tensor_parallel
            self._requeue(self.policy.lost(group), death.reason, now)

    def _computed(self, death: RankDied) -> list[Batch]:
        """What the rank that died was computing: one batch, or in lockstep, where an expert rank
        computes for all groups at once, all that run.
        """
        if death.batch not in self._running:
            return []
        if death.id.role == "expert" and self.spec.in_lockstep:
            return [batch for _, batch in self._running.values() if batch.segments]
        return [self._running[death.batch][1]]

    def _requeue(self, batches: list[Batch], reason: str, now: float) -> None:
        for batch in batches:
            del self._running[batch.id]
            match self._fates.pop(batch.id, Verdict.AGAIN):
                case Verdict.AGAIN:
                    self.policy.retry([batch])
                case Verdict.ALONE:
                    self._blame.settled(batch)
                    self.policy.retry(self.policy.alone(batch))
                case Verdict.GIVE_UP:
                    self._blame.settled(batch)
                    error = (
                        f"given up after {DEATHS_ALONE} deaths of the rank that ran it: {reason}"
                    )
                    self._answer([PrefillResult(s.key, error=error) for s in batch.segments], now)

    def _kill(self, rank: _Rank, reason: str) -> None:
        if not rank.killed and self._supervisor is not None:
            rank.killed = True
            self.outbox.append((self._supervisor, KillRank(rank.id, reason)))

    def _stalled(self, now: float) -> dict[RankId, float]:
        groups = {group for group, _ in self._running.values()}
        working = {member.id.rank for group in groups for member in self._members(group)}
        stalled = self._liveness.stalled(now, working)
        for rank in self._ranks.values():
            # One that starts again should load in about the time that its last life took.
            born = now if rank.born is None or rank.ready else rank.born
            if now - born > max(self._quiet_s, MARGIN * rank.load_seconds):
                stalled[rank.id] = now - born
        return stalled

    def _end_stalls(self, now: float) -> None:
        for id_, seconds in self._stalled(now).items():
            if seconds > self.spec.stall_timeout_s:
                reason = f"no progress for {seconds:.0f} s"
                self._kill(self._ranks[id_.role, id_.rank], reason)

    def _problems(self, stalled: dict[RankId, float]) -> list[str]:
        problems = [
            f"{id_} has work and has made no progress for {seconds:.0f} s"
            for id_, seconds in stalled.items()
        ]
        if self._started:
            problems += [
                f"{rank.id} is starting again"
                for rank in self._ranks.values()
                if not rank.ready and rank.id not in stalled
            ]
        return problems

    def _end(self, reason: str | None) -> None:
        if not self._ended and self._supervisor is not None:
            self._ended = True
            self.outbox.append((self._supervisor, Ended(reason)))


def _status(rank: _Rank, stalled: bool) -> RankStatus:
    progress = rank.progress or Progress(busy_seconds=0.0, tokens=0, work_items=0)
    state = "stalled" if stalled else progress.state if rank.ready else "starting"
    return RankStatus(
        id=rank.id,
        pid=rank.pid,
        ready=rank.ready,
        state=state,
        load_seconds=rank.load_seconds,
        lanes=progress.lanes,
        queue=progress.queue,
        serving=progress.serving,
        hottest=progress.hottest,
        memory_bytes=progress.memory_bytes,
        deaths=rank.deaths,
    )


def _difference(ours: Agreement, theirs: Agreement) -> str:
    """What two sides do not agree on, as one sentence; empty when they agree."""
    return "; ".join(
        f"{name} is {getattr(theirs, name)!r} here and {getattr(ours, name)!r} at the controller"
        for name in Agreement.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    )
