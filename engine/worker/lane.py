"""A lane: one batch on its way through the layers, as a state machine that never blocks.

    start -> attend -> dispatch -> (shared experts meanwhile) -> combine -> next layer -> results

`advance` computes until the batch depends on expert ranks; `take` receives what they send. An
attention rank has several lanes and advances whichever is ready.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.comm.primitives import Arrival, AttentionEndpoint
from engine.control.messages import PrefillRequest, PrefillResult, TokenLogprob
from engine.errors import RunError
from engine.kv.export import write_kv
from engine.model.attention import AttentionModel, Span
from engine.model.kv import PromptKV
from engine.schedule.types import Batch
from engine.worker.exchange import Exchange
from engine.worker.first_token import choose, token_logprobs

# Rows of [rows, vocabulary] float32 that exist at once for prompt log-probabilities.
LOGITS_ROWS = 256


class Lane:
    """ready: `advance` would compute. idle: `start` may be called."""

    def __init__(
        self,
        index: int,
        model: AttentionModel,
        endpoint: AttentionEndpoint,
        bounds: Sequence[range],
        window_tokens: int,
        kv_metadata: Mapping[str, str],
    ) -> None:
        self.index = index
        self.batch: Batch | None = None
        self._model = model
        self._endpoint = endpoint
        self._bounds = bounds
        self._window_tokens = window_tokens
        self._kv_metadata = kv_metadata
        self._exchange: Exchange | None = None

    @property
    def idle(self) -> bool:
        return self.batch is None

    @property
    def ready(self) -> bool:
        return self.batch is not None and (self._exchange is None or self._exchange.done)

    def start(self, batch: Batch, requests: Sequence[PrefillRequest]) -> None:
        """Takes a batch; `requests` belong to its segments, in order."""
        if self.batch is not None:
            raise RuntimeError(f"lane {self.index} is busy with batch {self.batch.id}")
        self.batch = batch
        self._requests = requests
        self._layer = 0
        self._spans = [Span(segment.start, segment.length) for segment in batch.segments]
        self._kvs = [
            PromptKV(
                self._model.config,
                length=len(request.token_ids),
                dtype=self._model.dtype,
                keep=request.kv_path is not None,
            )
            for request in requests
        ]
        token_ids = [
            token
            for request, span in zip(requests, self._spans, strict=True)
            for token in request.token_ids[span.start : span.start + span.length]
        ]
        positions = [torch.arange(span.start, span.start + span.length) for span in self._spans]
        self._token_ids = torch.tensor(token_ids)
        self._hidden = self._model.embed(self._token_ids)
        self._rope = self._model.rope(torch.cat(positions))

    def advance(self) -> list[PrefillResult] | None:
        """Computes up to the next dispatch (None), or to the end: the results, and idle again."""
        assert self.batch is not None
        if self._exchange is not None:
            self._exchange = None
            self._hidden = self._hidden + self._routed_sum
            self._layer += 1
        while self._layer < self._model.config.layers:
            self._hidden = self._model.attend(
                self._layer, self._hidden, self._rope, self._spans, self._kvs
            )
            if self._model.config.is_moe(self._layer):
                self._dispatch(self.batch.id)
                return None
            self._hidden = self._model.dense(self._layer, self._hidden)
            self._layer += 1
        results = self._finish()
        self.batch = None
        return results

    def take(self, arrival: Arrival) -> None:
        """Adds a combine that came for this lane."""
        if self._exchange is None:
            raise ValueError(f"{arrival} came to lane {self.index}, which awaits nothing")
        self._exchange.take(arrival, self._routed_sum)

    def _dispatch(self, batch: int) -> None:
        routed = self._model.route(self._layer, self._hidden)
        self._exchange = Exchange(
            self._endpoint,
            lane=self.index,
            batch=batch,
            layer=self._layer,
            routed=routed,
            bounds=self._bounds,
            window_tokens=self._window_tokens,
        )
        self._exchange.send()
        shared = self._model.shared(self._layer, routed.x)  # while the experts compute
        self._routed_sum = torch.zeros_like(self._hidden) if shared is None else shared

    def _finish(self) -> list[PrefillResult]:
        results = []
        row = 0
        for request, span, kv in zip(self._requests, self._spans, self._kvs, strict=True):
            rows = slice(row, row + span.length)
            results.append(self._result(request, kv, self._hidden[rows], self._token_ids[rows]))
            row += span.length
        del self._hidden, self._kvs, self._rope, self._requests
        return results

    def _result(
        self, request: PrefillRequest, kv: PromptKV, hidden: Tensor, token_ids: Tensor
    ) -> PrefillResult:
        logits = self._model.logits(hidden[-1:])
        token = choose(logits[0], request.sampling)
        top = None
        if request.logprobs is not None:
            top = token_logprobs(logits, torch.tensor([token]), request.logprobs)[0]
        prompt_logprobs = None
        if request.prompt_logprobs is not None:
            prompt_logprobs = self._prompt_logprobs(hidden, token_ids, request.prompt_logprobs)
        file = None
        if request.kv_path is not None:
            try:
                file = write_kv(
                    Path(request.kv_path),
                    kv.tensors(),
                    request.token_ids,
                    self._kv_metadata,
                )
            except RunError as error:  # the disk's trouble, and this prompt's alone
                return PrefillResult(request.key, error=str(error))
        return PrefillResult(request.key, token, top, prompt_logprobs, file)

    def _prompt_logprobs(
        self, hidden: Tensor, token_ids: Tensor, top: int
    ) -> list[list[TokenLogprob] | None]:
        """Of every prompt token given those before it, in chunks of LOGITS_ROWS; first is None."""
        entries: list[list[TokenLogprob] | None] = [None]
        for start in range(0, len(hidden) - 1, LOGITS_ROWS):
            stop = min(start + LOGITS_ROWS, len(hidden) - 1)
            logits = self._model.logits(hidden[start:stop])
            entries.extend(token_logprobs(logits, token_ids[start + 1 : stop + 1], top))
        return entries
