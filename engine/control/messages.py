"""Every message between clients, the controller and the ranks.

One tagged msgpack struct a message (`encode`, `decode`); the tag is the class name. A message
that does not decode is refused, never guessed at.
"""

from typing import TypeAlias

import msgspec

from engine.schedule.types import Batch
from engine.topology.ranks import RankId

PROTOCOL_VERSION = 1


# --- what a client asks for and gets ---------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True):
    """How the first token is chosen. Greedy at temperature 0; otherwise drawn with `seed`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int = 0


class PrefillRequest(msgspec.Struct, frozen=True):
    """One prompt to prefill. `key` is the client's own and comes back in the result.

    logprobs, prompt_logprobs: how many alternatives to report for the first token and for each
    prompt token; None reports nothing. kv_path: where to write the KV cache, or None.
    """

    key: int
    token_ids: list[int]
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    kv_path: str | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token, its natural-log probability, and its rank among all tokens (1 is the likeliest)."""

    token_id: int
    logprob: float
    rank: int


class KvFile(msgspec.Struct, frozen=True):
    """A KV cache that is complete on disk."""

    path: str
    tokens: int
    token_sha256: str
    shapes: dict[str, list[int]]
    dtype: str


class PrefillResult(msgspec.Struct, frozen=True):
    """What became of one PrefillRequest.

    top: the chosen token first, then the `logprobs` likeliest by rank. prompt_logprobs: one entry
    for each prompt token (None for the first): the actual token first, then the likeliest.
    queue_s, compute_s: seconds between submission and start, and between start and result.
    error: why this prompt alone failed (then the rest is meaningless).
    """

    key: int
    token_id: int = -1
    top: list[TokenLogprob] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    kv: KvFile | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0
    error: str | None = None


# --- client -> controller --------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[PrefillRequest]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """No more requests will come from this client: nothing need wait for company."""


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Asks for one Snapshot."""


# --- controller -> client --------------------------------------------------------------------


class Results(msgspec.Struct, frozen=True, tag=True):
    results: list[PrefillResult]


class RankStatus(msgspec.Struct, frozen=True):
    """busy: share of the time since the first batch that the rank computed, 0 to 1."""

    id: RankId
    pid: int
    ready: bool
    load_seconds: float = 0.0
    busy_seconds: float = 0.0
    busy: float = 0.0
    tokens: int = 0
    work_items: int = 0


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    ready: bool
    waiting: int
    running: int
    finished: int
    failed: int
    ranks: list[RankStatus]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The controller will not go on with this peer, and why."""

    reason: str


# --- rank -> controller ----------------------------------------------------------------------


class Agreement(msgspec.Struct, frozen=True):
    """What both sides of a dispatch must have in common; compared field by field at hello."""

    version: str
    model: str
    model_hash: str
    dtype: str
    hidden_size: int
    layers: int
    experts: int
    top_k: int
    lanes: int
    window_tokens: int
    protocol: int = PROTOCOL_VERSION


class Hello(msgspec.Struct, frozen=True, tag=True):
    id: RankId
    pid: int
    agreement: Agreement


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Weights are loaded and every pair of this rank is warm."""

    load_seconds: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Counters since start: seconds of computing, tokens and work items (or layers) done."""

    busy_seconds: float
    tokens: int
    work_items: int


class BatchDone(msgspec.Struct, frozen=True, tag=True):
    batch: int
    results: list[PrefillResult]


# --- controller -> rank ----------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answers a Hello: both sides agree."""


class Run(msgspec.Struct, frozen=True, tag=True):
    """A batch for one lane of an attention group, with the requests its segments belong to."""

    batch: Batch
    lane: int
    requests: list[PrefillRequest]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now; nothing is running any more or nothing of it matters."""


Message: TypeAlias = (
    Submit
    | Drain
    | Watch
    | Results
    | Snapshot
    | Refused
    | Hello
    | Ready
    | Progress
    | BatchDone
    | Welcome
    | Run
    | Stop
)

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Raises msgspec.DecodeError (msgspec.ValidationError included) on anything unexpected."""
    return _decoder.decode(data)
