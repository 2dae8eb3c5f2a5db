"""A tokenizer of letters and an engine that answers at once, for tests of the offline path."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.api import pieces
from engine.api.answers import AnswerWriter
from engine.api.chat_template import ChatTemplate
from engine.api.parse import Limits, Parser
from engine.api.pieces import Piece
from engine.api.tokenizer import Tokenizer
from engine.control.messages import (
    PrefillRequest,
    PrefillResult,
    RankStatus,
    Snapshot,
    TokenLogprob,
)
from engine.offline.lines import Line
from engine.offline.records import RecordWriter
from engine.topology.ranks import RankId

VOCABULARY = 256
BOS = 1
EOS = 2
FINGERPRINT = "fp_aaaaaaaa_bbbbbbbb"

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ByteCodec:
    """Token ids are UTF-8 bytes; a bos token goes before every text."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def piece(self, token_id: int) -> Piece:
        if token_id in (BOS, EOS):
            return pieces.special("<s>" if token_id == BOS else "</s>")
        return pieces.from_bytes(bytes([token_id]))


def byte_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer(ByteCodec(), ChatTemplate(template, {}))


def parser(tokenizer: Tokenizer | None = None, **limits: Any) -> Parser:
    given = {"vocab_size": VOCABULARY, "max_model_len": 50} | limits
    return Parser(Limits(**given), tokenizer or byte_tokenizer())


def writer(tokenizer: Tokenizer | None = None) -> RecordWriter:
    return RecordWriter(answers(tokenizer))


def answers(tokenizer: Tokenizer | None = None) -> AnswerWriter:
    return AnswerWriter(
        tokenizer or byte_tokenizer(), model="tiny", eos_token_ids=[EOS], fingerprint=FINGERPRINT
    )


def line(data: bytes | None, number: int = 1) -> Line:
    return Line(number, data)


class FakeEngine:
    """Answers each request with the token 'x', the latest request first.

    answer: what to say instead. batch: results that one `receive` gives at most.
    """

    def __init__(
        self, answer: Callable[[PrefillRequest], PrefillResult] | None = None, batch: int = 3
    ) -> None:
        self._answer = answer or self.default
        self._batch = batch
        self.pending: list[PrefillRequest] = []
        self.requests: list[PrefillRequest] = []
        self.most_prompts = 0
        self.most_tokens = 0
        self.starts = 0
        self.ended = 0
        self.drained = False

    @staticmethod
    def default(request: PrefillRequest) -> PrefillResult:
        chosen = TokenLogprob(ord("x"), -0.5, 1)
        return PrefillResult(
            request.key,
            ord("x"),
            None if request.logprobs is None else [chosen] * (request.logprobs + 1),
            compute_s=0.25,
        )

    @contextmanager
    def start(self) -> Iterator["FakeEngine"]:
        self.starts += 1
        try:
            yield self
        finally:
            self.ended += 1

    def submit(self, requests: Sequence[PrefillRequest]) -> None:
        assert not self.drained
        self.requests += requests
        self.pending += requests
        self.most_prompts = max(self.most_prompts, len(self.pending))
        tokens = sum(len(request.token_ids) for request in self.pending)
        self.most_tokens = max(self.most_tokens, tokens)

    def drain(self) -> None:
        self.drained = True

    def receive(self, timeout_s: float) -> list[PrefillResult]:
        taken = [self.pending.pop() for _ in range(min(self._batch, len(self.pending)))]
        return [self._answer(request) for request in taken]

    def request_snapshot(self) -> None:
        pass

    def snapshot(self) -> Snapshot | None:
        return None

    def fresh_snapshot(self, timeout_s: float) -> Snapshot | None:
        rank = RankStatus(RankId("expert", 0), pid=1, ready=True, busy=0.5)
        return Snapshot(True, 0, 0, len(self.requests), 0, [rank])
