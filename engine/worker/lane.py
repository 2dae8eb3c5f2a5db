"""A lane: one batch on its way through the layers, as a state machine that never blocks.

    start -> attend -> dispatch -> (shared experts meanwhile) -> combine -> next layer -> results

`advance` computes until the batch depends on expert ranks; `take` receives what they send. An
attention rank has several lanes and advances whichever is ready.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from engine.comm.collectives import TensorParallel
from engine.comm.primitives import Arrival, AttentionEndpoint
from engine.control.messages import PrefillRequest, PrefillResult
from engine.model.spans import Span
from engine.model.timing import listening
from engine.schedule.types import Batch, Step
from engine.topology.shard import most_rows
from engine.worker.exchange import Exchange
from engine.worker.parts import AttentionPart
from engine.worker.prompt import Prompt
from engine.worker.recorder import Recorder


class Lane:
    """ready: `advance` would compute. `start` may be called when no batch is there.

    window_tokens: the most rows of this rank in one dispatch. prompts: those of which a segment
    has been computed but not the last; the lanes of a rank share it, because the segments of a
    prompt may come to different lanes. team: the attention group. Its members divide the heads in
    attention and the batch's rows everywhere else; only the first one `answers`. senders: how many
    attention ranks dispatch together: the team, or where all groups are in lockstep, every one.
    """

    def __init__(
        self,
        index: int,
        model: AttentionPart,
        endpoint: AttentionEndpoint,
        bounds: Sequence[range],
        window_tokens: int,
        prompts: dict[int, Prompt],
        kv_metadata: Mapping[str, str],
        recorder: Recorder | None = None,
        team: TensorParallel | None = None,
        senders: int | None = None,
    ) -> None:
        self.index = index
        self.batch: Batch | None = None
        self._layer = 0
        self._model = model
        self._endpoint = endpoint
        self._bounds = bounds
        self._window_tokens = window_tokens
        self._unfinished = prompts
        self._kv_metadata = kv_metadata
        self._recorder = recorder or Recorder()
        self._team = team or TensorParallel.solo()
        self._senders = senders or self._team.size
        self._exchange: Exchange | None = None

    @property
    def ready(self) -> bool:
        return self.batch is not None and (self._exchange is None or self._exchange.done)

    @property
    def answers(self) -> bool:
        return self._team.member == 0

    def own_tokens(self, batch: Batch) -> int:
        """How many of the batch's rows are this rank's."""
        return len(range(batch.tokens)[self._team.rows(batch.tokens)])

    @property
    def layer(self) -> int:
        return self._layer

    @property
    def awaited(self) -> set[int]:
        """The expert ranks that have not sent what this lane needs."""
        return set() if self._exchange is None else self._exchange.awaited

    @property
    def next_flops(self) -> float:
        """About how many floating-point operations `advance` will take."""
        if self._finishes_next:
            return sum(prompt.finish_flops(self._model) for prompt in self._prompts)
        return self._model.layer_flops(self._spans)

    @property
    def next_file_bytes(self) -> int:
        """How many bytes `advance` will write to disk: KV caches, after the last layer."""
        return sum(p.file_bytes for p in self._prompts) if self._finishes_next else 0

    @property
    def _finishes_next(self) -> bool:
        return self._layer + (self._exchange is not None) >= self._model.config.layers

    def start(
        self, batch: Batch, requests: Sequence[PrefillRequest], step: Step | None = None
    ) -> None:
        """Takes a batch; `requests` belong to its segments, in order. step: of groups in lockstep,
        where a batch may have no segments.
        """
        if self.batch is not None:
            raise RuntimeError(f"lane {self.index} is busy with batch {self.batch.id}")
        self.batch = batch
        self._step = step or Step(batch.id, batch.tokens)
        self._layer = 0
        self._spans = [Span(segment.start, segment.length) for segment in batch.segments]
        self._prompts = [self._prompt(request) for request in requests]
        self._kvs = [prompt.kv for prompt in self._prompts]
        pairs = list(zip(self._prompts, self._spans, strict=True))
        token_ids = [token for prompt, span in pairs for token in prompt.tokens(span)]
        positions = [torch.arange(span.start, span.start + span.length) for span in self._spans]
        device = self._model.device
        own = token_ids[self._team.rows(batch.tokens)]
        self._hidden = self._model.embed(torch.tensor(own, dtype=torch.int64, device=device))
        self._rope = self._model.rope(torch.cat([torch.arange(0), *positions]).to(device))

    def advance(self) -> list[PrefillResult] | None:
        """Computes up to the next dispatch (None), or to the end: the results, and idle again."""
        assert self.batch is not None
        if self._exchange is not None:
            self._exchange = None
            self._hidden = self._hidden + self._routed_sum
            self._layer += 1
        while self._layer < self._model.config.layers:
            if self.batch.segments:
                with self._span("attend"), self._parts():
                    self._attend(self.batch.tokens)
            if self._model.config.is_moe(self._layer):
                self._dispatch()
                return None
            with self._span("dense"):
                self._hidden = self._model.dense(self._layer, self._hidden)
            self._layer += 1
        with self._span("finish"):
            results = self._finish(self.batch.tokens) if self.batch.segments else []
        self.batch = None
        return results

    def _attend(self, tokens: int) -> None:
        """Own rows -> all rows for the own heads -> the own rows of all heads' sum."""
        x = self._team.gather(self._model.norm_input(self._layer, self._hidden), tokens)
        mixed = self._model.mix(self._layer, x, self._rope, self._spans, self._kvs)
        self._hidden = self._hidden + self._team.scatter_sum(mixed)

    def take(self, arrival: Arrival) -> None:
        """Adds a combine that came for this lane."""
        if self._exchange is None:
            raise ValueError(f"{arrival} came to lane {self.index}, which awaits nothing")
        self._exchange.take(arrival, self._routed_sum)

    def send_again(self, lost: Arrival) -> None:
        """Repeats a dispatch that died with its expert rank."""
        assert self._exchange is not None
        self._exchange.again(lost)

    def _prompt(self, request: PrefillRequest) -> Prompt:
        if request.key in self._unfinished:
            return self._unfinished.pop(request.key)
        return Prompt(request, self._model)

    def _dispatch(self) -> None:
        with self._span("route"):
            routed = self._model.route(self._layer, self._hidden)
            self._exchange = Exchange(
                self._endpoint,
                lane=self.index,
                batch=self._step.id,
                layer=self._layer,
                routed=routed,
                bounds=self._bounds,
                window_tokens=self._window_tokens,
                senders=self._senders,
                most_rows=most_rows(self._step.most_tokens, self._team.size),
                recorder=self._recorder,
            )
        self._exchange.send()
        with self._span("shared"):  # while the experts compute
            shared = self._model.shared(self._layer, routed.x)
        self._routed_sum: Tensor = torch.zeros_like(self._hidden) if shared is None else shared

    def _span(self, what: str) -> AbstractContextManager[None]:
        batch = -1 if self.batch is None else self.batch.id
        return self._recorder.span(what, batch, self.index, self._layer, tokens=len(self._hidden))

    def _parts(self) -> AbstractContextManager[None]:
        """Spans of what the model says that it computes inside."""
        return listening(self._span) if self._recorder.on else nullcontext()

    def _finish(self, tokens: int) -> list[PrefillResult]:
        results = []
        rows = self._team.gather(self._hidden, tokens).split([s.length for s in self._spans])
        for prompt, span, hidden in zip(self._prompts, self._spans, rows, strict=True):
            done = prompt.ends_with(span)
            result = prompt.finish(span, hidden, self._model, self._kv_metadata, self._team)
            if not done:
                self._unfinished[prompt.request.key] = prompt
            elif result is not None:
                results.append(result)
        del self._hidden, self._rope, self._prompts, self._kvs
        return results
