"""The topology file: its sections, keys, defaults and ranges.

This is the whole vocabulary of topology files. What the present version can run is narrower, and
`SUPPORTED` says how much: anything else is refused by name, never ignored.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from engine.echo import plain
from engine.files import absolute

Count: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]
# A rank is handed the descriptors of all its windows in one message, and Linux passes at most 253.
MOST_PEERS = 240
Peers: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_PEERS)]
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_PEERS)]
Auto: TypeAlias = Literal["auto"]
Kind: TypeAlias = Literal["cpu", "cuda", "npu"]
# What ranks are on. A paced one is a process on the CPU that waits instead of computing.
Device: TypeAlias = Literal["cpu", "cuda", "npu", "paced"]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Gigabytes: TypeAlias = Annotated[float, Meta(ge=0.001, le=10**6)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.001, le=31_536_000)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the sections. Every key has a default that works."""


class Model(Section, frozen=True):
    """path: a folder in Hugging Face layout, or "demo". max_model_len: longest prompt, in tokens;
    "auto" is the smaller of the model's own limit and what fits in memory.
    """

    path: Text = "demo"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    max_model_len: Count | Auto = "auto"


class Attention(Section, frozen=True):
    """groups: how many copies of the attention side work on prompts at the same time.
    tensor_parallel: over how many ranks the heads of a group are divided. device_memory_gb: of one
    device, in 10^9 bytes; without it, what the devices here have. overlap: sends and receives on
    streams of their own, where the device has streams.
    """

    groups: Peers | Auto = "auto"
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    device: Device = "cpu"
    device_memory_gb: Gigabytes | None = None
    overlap: bool = False
    threads: Count | Auto = "auto"

    @property
    def kind(self) -> Kind:
        return _kind(self.device)


class Experts(Section, frozen=True):
    """ranks: over how many processes the experts of every layer are divided."""

    ranks: Peers | Auto = "auto"
    device: Device = "cpu"
    device_memory_gb: Gigabytes | None = None
    threads: Count | Auto = "auto"
    shared_experts: Literal["attention", "experts"] = "attention"
    order: Literal["round-robin", "first-ready"] = "round-robin"
    replicas: dict[str, Any] = {}

    @property
    def kind(self) -> Kind:
        return _kind(self.device)


class Paced(Section, frozen=True):
    """How long ranks wait whose device is "paced". hardware: a table of costs, by file or by name.
    scale: by how much its times are multiplied.
    """

    hardware: Text = "cloudmatrix384"
    scale: Annotated[float, Meta(ge=0.0001, le=10**6)] = 1.0


class Comm(Section, frozen=True):
    """transport: what carries the payload; "auto" is shm, or nccl or hccl between devices that have
    it. window_tokens: most tokens in one dispatch of a group; a larger one goes in several.
    connect_timeout_s: how long ranks wait for each other's communicators, and nodes for each other.
    node_timeout_s: after so long without a sign of life of a node (there is one a second), all end.
    """

    transport: Literal["auto", "shm", "gloo", "nccl", "hccl"] = "auto"
    window_tokens: Count | Auto = "auto"
    connect_timeout_s: Annotated[float, Meta(ge=1, le=7200)] = 300.0
    node_timeout_s: Annotated[float, Meta(ge=2, le=3600)] = 15.0


class Schedule(Section, frozen=True):
    """min_batch_tokens: a batch is aggregated up to here; auto: where expert ranks measure that
    more gains little. lanes: batches that a group has at once.
    exclusive_tokens: a longer prompt has its group to itself. chunk_tokens: most tokens of a batch
    of sync-chunked, which cuts prompts. max_wait_ms: how long a batch waits for company.
    ttft_slo_s: the time to first token that goodput is measured against. stall_timeout_s: how long
    a rank may make no progress before it is started again.
    """

    policy: Literal["asap", "asap+", "sync", "sync-chunked", "sync-afd"] = "asap"
    min_batch_tokens: Count | Auto = 2048
    max_batch_tokens: Count = 4096
    lanes: Count = 2
    exclusive_tokens: Count = 16384
    chunk_tokens: Count = 8192
    max_wait_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 20.0
    ttft_slo_s: Seconds | None = None
    stall_timeout_s: Seconds = 60.0

    @property
    def in_lockstep(self) -> bool:
        """Whether all attention groups wait for each other in every layer with experts."""
        return self.policy.startswith("sync")

    @property
    def is_colocated(self) -> bool:
        """Whether attention rank i and expert rank i stand for one device."""
        return self.policy in ("sync", "sync-chunked")

    @property
    def cuts_prompts(self) -> bool:
        return self.policy == "sync-chunked"

    @property
    def batch_limit(self) -> int:
        """Most tokens of a batch that is more than one prompt."""
        return self.chunk_tokens if self.cuts_prompts else self.max_batch_tokens


class Serve(Section, frozen=True):
    """The HTTP server of `asapctl launch`. port 0: any that is free. api_key: what clients must
    send; ASAPCTL_API_KEY goes before it. max_queue: most requests at a time, running or waiting.
    body_timeout_s: how long a client may take to send a request. model_name: what clients call the
    model. kv_dir: where KV caches go that clients ask for; without it they cannot. kv_max_gb (in
    10^9 bytes), kv_max_age_s: when caches there are removed, oldest first.
    """

    host: Text = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    api_key: Text | None = None
    model_name: Text | None = None
    max_body_mb: Annotated[float, Meta(ge=0.001, le=4096)] = 32.0
    max_queue: Count = 2048
    body_timeout_s: Seconds = 30.0
    kv_dir: Text | None = None
    kv_max_gb: Annotated[float, Meta(ge=0.001, le=10**6)] = 16.0
    kv_max_age_s: Seconds = 3600.0


class Instances(Section, frozen=True):
    """count: how many times all of the ranks, behind one HTTP server."""

    count: Peers = 1


class Node(Section, frozen=True):
    """One of the `[[nodes]]` of an instance, in order of node ranks: the attention groups and the
    expert ranks that live there, by number. Without any `[[nodes]]` they are divided evenly.
    """

    attention: tuple[Number, ...] = ()
    experts: tuple[Number, ...] = ()


class Topology(msgspec.Struct, frozen=True):
    """A checked topology. `source` names the file, and `overridden` the "section.key"s that were
    set outside it, so that whoever finds a problem later can say where (`where`).
    """

    model: Model = Model()
    attention: Attention = Attention()
    experts: Experts = Experts()
    comm: Comm = Comm()
    schedule: Schedule = Schedule()
    serve: Serve = Serve()
    paced: Paced = Paced()
    instances: Instances = Instances()
    nodes: tuple[Node, ...] = ()
    source: str = "topology"
    folder: Path | None = None
    overridden: frozenset[str] = frozenset()

    @property
    def is_paced(self) -> bool:
        """Whether ranks wait instead of computing: those of both sides, or none."""
        return self.attention.device == "paced"

    def where(self, section: str, key: str) -> str:
        """How a message names a key: `cpu.toml: [attention] groups`."""
        return locate(self.source, section, key, self.overridden)

    def resolve(self, section: str, key: str, path: str) -> Path:
        """The value `path` of a key as an absolute path: from the file, it counts from the file's
        folder, and from outside from the working folder. Raises UsageError: no such home folder.
        """
        inside = f"{section}.{key}" not in self.overridden
        return absolute(path, self.where(section, key), self.folder if inside else None)


def _kind(device: Device) -> Kind:
    return "cpu" if device == "paced" else device


def locate(source: str, section: str, key: str, overridden: frozenset[str]) -> str:
    if f"{section}.{key}" in overridden:
        return f"--set {section}.{plain(key)}"
    return f"{source}: [{section}] {plain(key)}"


SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "attention": Attention,
    "experts": Experts,
    "comm": Comm,
    "schedule": Schedule,
    "serve": Serve,
    "paced": Paced,
    "instances": Instances,
}

# What this version runs, where the vocabulary is wider.
SUPPORTED: dict[tuple[str, str], tuple[object, ...]] = {
    ("attention", "threads"): ("auto", 1),
    ("experts", "threads"): ("auto", 1),
    ("experts", "shared_experts"): ("attention",),
    ("experts", "order"): ("round-robin",),
    ("experts", "replicas"): ({},),
    ("schedule", "policy"): ("asap", "sync", "sync-chunked", "sync-afd"),
}
