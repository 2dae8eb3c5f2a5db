"""A prompt in an attention rank: its keys and values, and what its tokens have told so far."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.comm.collectives import TensorParallel
from engine.control.messages import KvFile, PrefillRequest, PrefillResult, TokenLogprob
from engine.errors import RunError
from engine.kv.export import write_kv
from engine.kv.team import whole_parts
from engine.model.kv import PromptKV
from engine.model.spans import Span
from engine.worker.first_token import choose, token_logprobs
from engine.worker.parts import AttentionPart

# Rows of [rows, vocabulary] float32 that exist at once for prompt log-probabilities.
LOGITS_ROWS = 256


class Prompt:
    """Lives from its first segment to its last, which may be the same one."""

    def __init__(self, request: PrefillRequest, model: AttentionPart) -> None:
        self.request = request
        self.kv = PromptKV(
            model.config,
            length=len(request.token_ids),
            dtype=model.dtype,
            keep=request.kv_path is not None,
        )
        self._logprobs: list[list[TokenLogprob] | None] = [None]  # nothing precedes the first

    def tokens(self, span: Span) -> list[int]:
        return self.request.token_ids[span.start : span.start + span.length]

    def finish_flops(self, model: AttentionPart) -> float:
        """About how many floating-point operations `finish` takes: mostly the head's."""
        rows = 1 if self.request.prompt_logprobs is None else len(self.request.token_ids)
        return 2.0 * rows * model.config.hidden_size * model.config.vocab_size

    @property
    def file_bytes(self) -> int:
        """Size of the KV cache that `finish` writes."""
        return 0 if self.request.kv_path is None else self.kv.nbytes

    def ends_with(self, span: Span) -> bool:
        return span.start + span.length == len(self.request.token_ids)

    def finish(
        self,
        span: Span,
        hidden: Tensor,
        model: AttentionPart,
        kv_metadata: Mapping[str, str],
        team: TensorParallel,
    ) -> PrefillResult | None:
        """Takes the rows [n, H] of `span` after the last layer; the result if it was the last one.

        All members of `team` call it; the first one has the result.
        """
        cache: dict[str, Tensor] = {}
        if self.ends_with(span) and self.request.kv_path is not None:
            # First, and whatever happens to this prompt: the members do it together.
            cache = whole_parts(self.kv, team, model.whole)
        if team.member > 0:
            return None
        try:
            return self._finish(span, hidden, model, cache, kv_metadata)
        except RunError as error:  # logits that are not finite, a full disk: this prompt's alone
            return PrefillResult(self.request.key, error=str(error))

    def _finish(
        self,
        span: Span,
        hidden: Tensor,
        model: AttentionPart,
        cache: Mapping[str, Tensor],
        kv_metadata: Mapping[str, str],
    ) -> PrefillResult | None:
        request = self.request
        if request.prompt_logprobs is not None:
            self._score(span, hidden, model, request.prompt_logprobs)
        if not self.ends_with(span):
            return None
        logits = model.logits(hidden[-1:]).cpu()
        token = choose(logits[0], request.sampling)
        top = None
        if request.logprobs is not None:
            top = token_logprobs(logits, torch.tensor([token]), request.logprobs)[0]
        kv = self._write_kv(cache, kv_metadata)
        scores = None if request.prompt_logprobs is None else self._logprobs
        return PrefillResult(request.key, token, top, scores, kv)

    def _score(self, span: Span, hidden: Tensor, model: AttentionPart, top: int) -> None:
        """Log-probabilities of the tokens that follow the rows of `span`, a few rows at a time."""
        following = torch.tensor(self.tokens(Span(span.start + 1, span.length)))
        for rows, targets in zip(
            hidden[: len(following)].split(LOGITS_ROWS), following.split(LOGITS_ROWS), strict=True
        ):
            if len(targets):
                self._logprobs.extend(token_logprobs(model.logits(rows).cpu(), targets, top))

    def _write_kv(self, cache: Mapping[str, Tensor], metadata: Mapping[str, str]) -> KvFile | None:
        path = self.request.kv_path
        if path is None:
            return None
        return write_kv(Path(path), cache, self.request.token_ids, metadata)
