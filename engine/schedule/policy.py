"""The request scheduler: which prompts run together, and on which attention group."""

from collections import deque
from collections.abc import Sequence

from engine.schedule.batching import Aggregator, Draft
from engine.schedule.types import Assignment, Batch, Request, Segment


class AsapPolicy:
    """The paper's policy ("ASAP", arXiv 2606.22541: length-aware batching, dual batches).

    - Prompts are aggregated, first come first served, until a batch holds `min_batch_tokens`;
      none exceeds `max_batch_tokens` unless it is one single prompt.
    - An idle group (one that runs nothing) gets `lanes` batches at once, so that one computes
      attention while another is with the experts.
    - A prompt of more than `exclusive_tokens` gets a group to itself.
    - A set of batches that is not complete waits for company until its oldest prompt is
      `max_wait_s` old, and then goes as it is.

    Of what could start now, that whose first prompt came first starts first; so nothing starves.
    Batches whose group was lost go before all else, in the composition that they had.
    Requests are taken to come in the order of their arrival. `now` and arrivals share one clock.
    """

    def __init__(
        self,
        groups: int,
        lanes: int,
        min_batch_tokens: int,
        max_batch_tokens: int,
        exclusive_tokens: int,
        max_wait_s: float,
    ) -> None:
        if groups < 1 or lanes < 1 or exclusive_tokens < 1 or max_wait_s < 0:
            raise ValueError(
                f"out of range: {groups=}, {lanes=}, {exclusive_tokens=}, {max_wait_s=}"
            )
        self._lanes = lanes
        self._exclusive_tokens = exclusive_tokens
        self._max_wait_s = max_wait_s
        self._ordinary = Aggregator(min_batch_tokens, max_batch_tokens)
        self._exclusive: deque[Draft] = deque()
        self._idle = deque(range(groups))  # the group that has been idle longest comes first
        self._lost: set[int] = set()  # groups that get nothing until they recover
        self._running: dict[int, dict[int, Batch]] = {}  # by group and batch id
        self._retries: deque[Batch] = deque()
        self._turns = 0
        self._drained_turn = 0
        self._batches = 0
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Prompts that no group has yet."""
        return self._waiting

    @property
    def running(self) -> int:
        """Prompts that a group works on."""
        return sum(len(b.segments) for group in self._running.values() for b in group.values())

    def add(self, request: Request) -> None:
        if request.tokens < 1:
            raise ValueError(f"a prompt without tokens cannot be scheduled: {request}")
        if request.tokens > self._exclusive_tokens:
            draft = Draft(self._turns, request.arrival)
            draft.append(request)
            self._exclusive.append(draft)
        else:
            self._ordinary.add(self._turns, request)
        self._turns += 1
        self._waiting += 1

    def aggregate(self, min_batch_tokens: int) -> None:
        """Changes up to where prompts are aggregated, `max_batch_tokens` at most."""
        self._ordinary.aggregate(min_batch_tokens)

    def drain(self) -> None:
        """Nothing added so far need wait for company any more."""
        self._drained_turn = self._turns

    def next(self, now: float) -> list[Assignment]:
        """What idle groups start now. Each batch here must be reported `finished` once."""
        assignments = []
        while self._idle and (batches := self._take_retries() or self._take(now)):
            group = self._idle.popleft()
            self._running[group] = {batch.id: batch for batch in batches}
            self._waiting -= sum(len(batch.segments) for batch in batches)
            assignments.append(Assignment(group, tuple(batches)))
        return assignments

    def finished(self, group: int, batch_id: int) -> None:
        """Raises KeyError for a batch that the group does not run."""
        batches = self._running[group]
        del batches[batch_id]
        if not batches:
            del self._running[group]
            self._idle.append(group)

    def cancel(self, key: int) -> bool:
        """Forgets a prompt that has not started; False when there is none of that key."""
        if self._ordinary.remove(key):
            self._waiting -= 1
            return True
        for draft in self._exclusive:
            if draft.requests[0].key == key:
                self._exclusive.remove(draft)
                self._waiting -= 1
                return True
        return False

    def lost(self, group: int) -> list[Batch]:
        """A rank of `group` died: the batches that nobody runs any more. It is given nothing until
        it has `recovered`. What becomes of the batches is the caller's decision: `retry`, or not.
        """
        if group in self._idle:
            self._idle.remove(group)
        self._lost.add(group)
        return list(self._running.pop(group, {}).values())

    def recovered(self, group: int) -> None:
        if group in self._lost:
            self._lost.remove(group)
            self._idle.append(group)

    def retry(self, batches: Sequence[Batch]) -> None:
        """Runs `batches` before anything else, whole and under their own ids."""
        self._retries.extend(batches)
        self._waiting += sum(len(batch.segments) for batch in batches)

    def alone(self, batch: Batch) -> list[Batch]:
        """A batch of its own for each segment of `batch`."""
        return [self._number((segment,)) for segment in batch.segments]

    def next_deadline(self, now: float) -> float | None:
        """When to call `next` again even if nothing is added or finished until then.

        None when only an event can make a difference.
        """
        if not self._idle:
            return None
        if self._retries or self._exclusive or self._set_is_due(now):
            return now
        return self._due()

    def _take_retries(self) -> list[Batch]:
        """What the next idle group gets of them: a long prompt alone, or as many as its lanes."""
        taken: list[Batch] = []
        while self._retries and len(taken) < self._lanes:
            if taken and self._retries[0].tokens > self._exclusive_tokens:
                break
            taken.append(self._retries.popleft())
            if taken[-1].tokens > self._exclusive_tokens:
                break
        return taken

    def _take(self, now: float) -> list[Batch]:
        """What the next idle group gets: a long prompt, a set of batches, or nothing yet."""
        ordinary = self._ordinary.first if self._set_is_due(now) else None
        drafts: Sequence[Draft] = ()
        if self._exclusive and (ordinary is None or self._exclusive[0].turn < ordinary.turn):
            drafts = [self._exclusive.popleft()]
        elif ordinary:
            drafts = self._ordinary.take(self._lanes)
        return [self._number(draft.segments()) for draft in drafts]

    def _set_is_due(self, now: float) -> bool:
        """Whether ordinary batches may start: as many as there are lanes, or they waited enough."""
        first = self._ordinary.first
        if first is None:
            return False
        if self._ordinary.full >= self._lanes or first.turn < self._drained_turn:
            return True
        due = self._due()
        return due is not None and now >= due

    def _due(self) -> float | None:
        oldest = self._ordinary.oldest(self._lanes)
        return None if oldest is None else oldest + self._max_wait_s

    def _number(self, segments: tuple[Segment, ...]) -> Batch:
        self._batches += 1
        return Batch(self._batches - 1, segments)
