"""Every message between clients, the controller and the ranks.

One tagged msgpack struct a message (`encode`, `decode`); the tag is the class name. A message
that does not decode is refused, never guessed at.
"""

from typing import Literal, TypeAlias

import msgspec

from engine.schedule.types import Batch, Step
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
    error: why this prompt alone failed (then the rest is meaningless). refused: the instance takes
    no more prompts; this one was never tried.
    """

    key: int
    token_id: int = -1
    top: list[TokenLogprob] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    kv: KvFile | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0
    error: str | None = None
    refused: bool = False


# --- client -> controller --------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[PrefillRequest]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """No more requests will come from this client: nothing need wait for company."""


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Asks for one Snapshot."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for these any more: what has not started never will.

    Each is still answered once: refused at once, or as it turns out when its batch is done.
    """

    keys: list[int]


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Take no more requests, finish those that are here, then end the instance."""


class StartTrace(msgspec.Struct, frozen=True, tag=True):
    """Record spans in every rank for `seconds`; one TraceReport comes afterwards."""

    seconds: float


# --- controller -> client --------------------------------------------------------------------


class Results(msgspec.Struct, frozen=True, tag=True):
    results: list[PrefillResult]


class LaneStatus(msgspec.Struct, frozen=True):
    """What a lane of an attention rank holds."""

    lane: int
    batch: int
    tokens: int
    layer: int


class HotExpert(msgspec.Struct, frozen=True):
    """The expert of a rank with the most tokens so far, of all layers together.

    imbalance: its tokens over the mean of the rank's experts, 1 when all have the same.
    """

    expert: int
    tokens: int
    imbalance: float


RankState: TypeAlias = Literal["starting", "idle", "computing", "waiting", "stalled", "dead"]


class RankStatus(msgspec.Struct, frozen=True):
    """What is known of a rank.

    busy, waits: shares of the time since the first batch that the rank computed, and that it
    waited with work in its hands; 0 to 1. recent_busy, recent_waits: the same of the last seconds.
    queue: work items that an expert rank has not served; serving: their layers. deaths: how often
    it was started again. paced_seconds: as in Progress, of all its lives.
    """

    id: RankId
    pid: int
    ready: bool
    state: RankState = "starting"
    load_seconds: float = 0.0
    busy_seconds: float = 0.0
    busy: float = 0.0
    waits: float = 0.0
    recent_busy: float = 0.0
    recent_waits: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    work_items: int = 0
    lanes: list[LaneStatus] = []
    queue: int = 0
    serving: list[int] = []
    hottest: HotExpert | None = None
    memory_bytes: int = 0
    deaths: int = 0
    paced_seconds: float = 0.0


class Latency(msgspec.Struct, frozen=True):
    """Of `count` prompts, seconds."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class HistoryPoint(msgspec.Struct, frozen=True):
    """One second: prompt tokens per second, and mean busy share of each role, 0 to 1."""

    tokens_per_s: float
    attention_busy: float
    expert_busy: float


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """How an instance stands.

    ttft: of the last minute, from submission to result. tokens_per_s: prompt tokens of the last
    ten seconds. goodput: prompts per second of the last minute that met `ttft_slo_s`; without a
    target, prompts per second. min_batch_tokens: up to where prompts are aggregated; None as long
    as that is not measured. work: what the prompts that wait or run are predicted to take, see
    engine.schedule.cost. quitting: no more requests are taken. problems: what is wrong, in
    sentences; empty is healthy. history: the last minute, oldest first. paced: where ranks wait
    instead of computing, what has to be said beside all figures.
    """

    ready: bool
    waiting: int
    running: int
    finished: int
    failed: int
    ranks: list[RankStatus]
    uptime_s: float = 0.0
    prompt_tokens: int = 0
    tokens_per_s: float = 0.0
    ttft: Latency = Latency()
    goodput: float = 0.0
    ttft_slo_s: float | None = None
    work: int = 0
    quitting: bool = False
    problems: list[str] = []
    history: list[HistoryPoint] = []
    paced: str | None = None
    min_batch_tokens: int | None = None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that a rank did, for a trace. Times in seconds on the machine's monotonic clock.

    what: "embed", "attend", "dense", "route", "dispatch", "shared", "combine", "finish", "wait" of
    an attention rank, "serve" of an expert rank; inside "attend", "core" is scores and sums of
    values, and inside "serve", "experts" is their products. The rest says of which batch, lane,
    layer and tile, -1 where that has no meaning; peer is the other rank.
    """

    what: str
    start: float
    end: float
    batch: int = -1
    lane: int = -1
    layer: int = -1
    tile: int = -1
    peer: int = -1
    tokens: int = 0


class RankSpans(msgspec.Struct, frozen=True):
    """dropped: spans that were not recorded because there were too many. machine: whose monotonic
    clock the times are on (`engine.control.clock`), sent_at: when they were sent, by that clock.
    """

    id: RankId
    pid: int
    spans: list[Span]
    dropped: int = 0
    machine: str = ""
    sent_at: float = 0.0


class TraceReport(msgspec.Struct, frozen=True, tag=True):
    """The spans of every rank that answered, between `start` and `end` (monotonic seconds)."""

    start: float
    end: float
    ranks: list[RankSpans]


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
    """Weights are loaded and every pair of this rank is warm. inflection_tokens: of an expert rank
    that was to find it, see `engine.schedule.inflection`.
    """

    load_seconds: float
    inflection_tokens: int | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How a rank stands: counters since its start, and what it is about to do.

    busy_seconds, wait_seconds: computing, and blocked with work in its hands. predicted_s: how
    long the next step should take. waits_for: expert ranks that owe this attention rank a combine.
    paced_seconds: of a paced rank, how many of the busy ones it was to be busy for.
    """

    busy_seconds: float
    tokens: int
    work_items: int
    wait_seconds: float = 0.0
    state: Literal["idle", "computing", "waiting"] = "idle"
    predicted_s: float = 0.0
    waits_for: list[int] = []
    lanes: list[LaneStatus] = []
    queue: int = 0
    serving: list[int] = []
    hottest: HotExpert | None = None
    memory_bytes: int = 0
    paced_seconds: float = 0.0


class BatchDone(msgspec.Struct, frozen=True, tag=True):
    batch: int
    results: list[PrefillResult]


class StorePut(msgspec.Struct, frozen=True, tag=True):
    """Keeps `value` for those who build communicator `name` with the sender. add: the value is a
    number, to be added to what is there; it is answered as a StoreAsk of the key.
    """

    name: str
    key: str
    value: bytes
    add: bool = False


class StoreAsk(msgspec.Struct, frozen=True, tag=True):
    """Answered by StoreValues, at once or, with `wait`, when all of `keys` are there."""

    name: str
    keys: list[str]
    wait: bool = True


# --- controller -> rank ----------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answers a Hello: both sides agree."""


class Run(msgspec.Struct, frozen=True, tag=True):
    """A batch for one lane of an attention group, with the requests its segments belong to. step:
    where all groups go through the layers together.
    """

    batch: Batch
    lane: int
    requests: list[PrefillRequest]
    step: Step | None = None


class StoreValues(msgspec.Struct, frozen=True, tag=True):
    """What is there of the keys that were asked for."""

    values: dict[str, bytes]


class Record(msgspec.Struct, frozen=True, tag=True):
    """Record spans from now on for `seconds`, then send them as Spans."""

    seconds: float


class Spans(msgspec.Struct, frozen=True, tag=True):
    """rank -> controller: answers a Record."""

    spans: RankSpans


# --- supervisor <-> controller ---------------------------------------------------------------


class Supervise(msgspec.Struct, frozen=True, tag=True):
    """Sent once by the supervisor: it reports deaths, and gets KillRank and Ended."""


class RankDied(msgspec.Struct, frozen=True, tag=True):
    """A rank's process ended. A new one is being started as `successor`.

    batch: what it was computing at that moment, None when nothing. work_items: how many it had
    finished in this life. collateral: it went because another member of its group had died.
    """

    id: RankId
    successor: RankId
    reason: str
    batch: int | None
    work_items: int
    collateral: bool = False


class ClientGone(msgspec.Struct, frozen=True, tag=True):
    """The process of the client with this ZeroMQ identity ended: all that it asked for is void."""

    identity: bytes


class KillRank(msgspec.Struct, frozen=True, tag=True):
    """The supervisor is to kill this rank, which then is started again as after any death."""

    id: RankId
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The instance is over: all is done after a Quit (`reason` None), or it cannot go on."""

    reason: str | None = None


Message: TypeAlias = (
    Submit
    | Drain
    | Watch
    | Cancel
    | Quit
    | StartTrace
    | Results
    | Snapshot
    | TraceReport
    | Refused
    | Hello
    | Ready
    | Progress
    | BatchDone
    | StorePut
    | StoreAsk
    | StoreValues
    | Welcome
    | Run
    | Record
    | Spans
    | Supervise
    | RankDied
    | ClientGone
    | KillRank
    | Ended
)

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Raises msgspec.DecodeError (msgspec.ValidationError included) on anything unexpected."""
    return _decoder.decode(data)
