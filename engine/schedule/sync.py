"""The synchronous baselines' scheduler: all groups start together and wait for each other."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.types import Assignment, Batch, Request, Segment, Step


@dataclass
class _Cut:
    """A prompt of which `group` has computed, or computes, the first `done` tokens."""

    request: Request
    group: int
    done: int = 0


class LockstepPolicy:
    """Every attention group gets one batch at the same time, and the next one when all are done.

    - The next prompt in order of arrival goes to the group that has the fewest tokens, so batches
      have similar totals; none exceeds `max_batch_tokens` unless it is one single prompt. All wait
      for that one, so the batches beside it may be as large. With `chunk_tokens` no batch exceeds
      that: prompts are cut, and what is left of one comes first in its group's next batch.
    - Nothing waits for company. A group that nothing is left for gets a batch without segments.
    - What ran when ranks were lost goes before all else, with cut prompts whole, since the tokens
      that were done are lost. Where it is a single prompt, it runs alone: see `alone`.

    The interface is that of `AsapPolicy`.
    """

    def __init__(self, groups: int, max_batch_tokens: int, chunk_tokens: int | None = None) -> None:
        if groups < 1 or max_batch_tokens < 1 or (chunk_tokens is not None and chunk_tokens < 1):
            raise ValueError(f"out of range: {groups=}, {max_batch_tokens=}, {chunk_tokens=}")
        self._groups = groups
        self._cuts = chunk_tokens is not None
        self._budget = max_batch_tokens if chunk_tokens is None else chunk_tokens
        self._queue: deque[Request] = deque()
        self._retries: list[Batch] = []
        self._running: dict[int, Batch] = {}  # by group
        self._cut: dict[int, _Cut] = {}  # by key: those with tokens left to compute
        self._lost: set[int] = set()
        self._batches = 0

    @property
    def waiting(self) -> int:
        """Prompts that no group has yet."""
        return len(self._queue) + sum(len(batch.segments) for batch in self._retries)

    @property
    def running(self) -> int:
        """Prompts that a group works on."""
        segments = (s.key for batch in self._running.values() for s in batch.segments)
        return len({*segments, *self._cut})

    def add(self, request: Request) -> None:
        if request.tokens < 1:
            raise ValueError(f"a prompt without tokens cannot be scheduled: {request}")
        self._queue.append(request)

    def aggregate(self, min_batch_tokens: int) -> None:
        """Nothing is aggregated."""

    def drain(self) -> None:
        """Nothing waits for company anyway."""

    def next(self, now: float) -> list[Assignment]:
        """A batch for every group, or nothing. Each one must be reported `finished` once."""
        if not self._may_start:
            return []
        batches = self._take_retries() if self._retries else self._take()
        batches += [self._number(()) for _ in range(self._groups - len(batches))]
        self._running = dict(enumerate(batches))
        step = Step(batches[0].id, max(batch.tokens for batch in batches))
        return [Assignment(group, (batch,), step) for group, batch in self._running.items()]

    def finished(self, group: int, batch_id: int) -> None:
        """Raises KeyError for a batch that the group does not run."""
        if self._running[group].id != batch_id:
            raise KeyError(batch_id)
        del self._running[group]

    def cancel(self, key: int) -> bool:
        """Forgets a prompt that has not started; False when there is none of that key."""
        for request in self._queue:
            if request.key == key:
                self._queue.remove(request)
                return True
        return False

    def lost(self, group: int) -> list[Batch]:
        """A rank of `group` died: its batch, if it ran one, with cut prompts whole. Nothing starts
        until all groups that were lost have `recovered`.
        """
        self._lost.add(group)
        batch = self._running.pop(group, None)
        whole = () if batch is None else tuple(map(self._whole, batch.segments))
        for cut in [cut for cut in self._cut.values() if cut.group == group]:
            del self._cut[cut.request.key]  # of its group's last batch, which is done
            self._queue.appendleft(cut.request)
        return [] if batch is None else [Batch(batch.id, whole)]

    def recovered(self, group: int) -> None:
        self._lost.discard(group)

    def retry(self, batches: Sequence[Batch]) -> None:
        """Runs `batches` before anything else, under their own ids."""
        self._retries = sorted(
            [*self._retries, *(batch for batch in batches if batch.segments)],
            key=lambda batch: batch.id,
        )

    def alone(self, batch: Batch) -> list[Batch]:
        """A batch of its own for each segment of `batch`. A batch of one prompt that is to run
        again has the whole step to itself, so that it alone can be to blame for what happens.
        """
        return [self._number((segment,)) for segment in batch.segments]

    def next_deadline(self, now: float) -> float | None:
        """When to call `next` again even if nothing is added or finished until then."""
        return now if self._may_start else None

    @property
    def _may_start(self) -> bool:
        there = self._retries or self._cut or self._queue
        return bool(there) and not self._running and not self._lost

    def _take_retries(self) -> list[Batch]:
        """The first ones, in order; one that is a single prompt goes by itself."""
        count = 0
        while count < min(self._groups, len(self._retries)):
            if len(self._retries[count].segments) == 1:
                break
            count += 1
        count = max(count, 1)
        taken, self._retries = self._retries[:count], self._retries[count:]
        return taken

    def _take(self) -> list[Batch]:
        """Batches of what is left of cut prompts and of the queue, one for each group."""
        segments: list[list[Segment]] = [[] for _ in range(self._groups)]
        tokens = [0] * self._groups
        for cut in list(self._cut.values()):
            if room := self._budget - tokens[cut.group]:
                segment = self._advance(cut, room)
                segments[cut.group].append(segment)
                tokens[cut.group] += segment.length
        while self._queue:
            group = tokens.index(min(tokens))
            room = max(self._budget, *tokens) - tokens[group]
            request = self._queue[0]
            if room <= 0 or (not self._cuts and tokens[group] and request.tokens > room):
                break
            self._queue.popleft()
            segment = self._advance(_Cut(request, group), room if self._cuts else request.tokens)
            segments[group].append(segment)
            tokens[group] += segment.length
        return [self._number(tuple(parts)) for parts in segments]

    def _advance(self, cut: _Cut, most: int) -> Segment:
        """The prompt's next tokens, at most `most`; it stays cut while some are left."""
        key, start = cut.request.key, cut.done
        cut.done = min(cut.request.tokens, start + most)
        self._cut[key] = cut
        if cut.done == cut.request.tokens:
            del self._cut[key]
        return Segment(key, start, cut.done - start)

    def _whole(self, segment: Segment) -> Segment:
        cut = self._cut.pop(segment.key, None)
        tokens = segment.start + segment.length if cut is None else cut.request.tokens
        return Segment(segment.key, 0, tokens)

    def _number(self, segments: tuple[Segment, ...]) -> Batch:
        self._batches += 1
        return Batch(self._batches - 1, segments)
