"""How much memory the ranks of a layout need: pure arithmetic over the model's sizes."""

import dataclasses
from dataclasses import dataclass

from engine.comm.layout import WindowShape
from engine.device import grouped_mlp, npu_operators
from engine.launch.accelerators import Slot
from engine.launch.wiring import Wiring
from engine.model.architecture import GroupedQuery, ModelConfig
from engine.model.sizes import kv_bytes_per_token, weight_bytes, working_set_bytes
from engine.topology.placement import place_experts
from engine.topology.ranks import RankId, Role
from engine.topology.schema import Schedule
from engine.topology.shard import most_rows

# Measured with torch 2.13 for CPU: what a forked rank comes to own besides what it is planned
# for, and what the command, the zygote and the controller take together.
PROCESS_BYTES = 48 * 2**20
BASE_BYTES = 448 * 2**20
# Estimates, not measured: what a driver takes of its device for a process (context, kernels,
# workspaces of the libraries), and what its libraries take of the host's memory.
DRIVER_BYTES = 2**30
DRIVER_HOST_BYTES = 2 * 2**30

_ON_DEVICE = frozenset({"weights", "working set", "KV caches", "communicators", "driver"})


@dataclass(frozen=True)
class RankPlan:
    """The memory of one rank, in bytes, and the device it computes on (None: the CPU).

    Windows in shared memory are charged to the expert side; otherwise each end has its own.
    working_set_bytes: activations at their peak. kv_bytes: caches that are kept to be exported.
    gathered_bytes: where heads are divided, one that is put together from all members, on the host.
    driver_bytes: what the driver takes of the device. on_device: which `parts` lie there. paced: it
    waits on the CPU instead of computing.
    """

    id: RankId
    experts: range
    weights_bytes: int
    windows_bytes: int
    working_set_bytes: int
    kv_bytes: int
    process_bytes: int = PROCESS_BYTES
    communicators_bytes: int = 0
    gathered_bytes: int = 0
    driver_bytes: int = 0
    on_device: frozenset[str] = frozenset()
    device: Slot | None = None
    paced: bool = False

    @property
    def place(self) -> str:
        """Where it computes: the device as a mask names it, "npu 3", or "cpu", or "paced"."""
        if self.device is not None:
            return f"{self.device.kind} {self.device.visible}"
        return "paced" if self.paced else "cpu"

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def device_bytes(self) -> int:
        """How much of `total` lies on the device; 0 on the CPU."""
        return sum(size for part, size in self.parts.items() if part in self.on_device)

    @property
    def host_bytes(self) -> int:
        return self.total - self.device_bytes

    @property
    def parts(self) -> dict[str, int]:
        """What `total` is made of, by name."""
        return {
            "weights": self.weights_bytes,
            "windows": self.windows_bytes,
            "working set": self.working_set_bytes,
            "KV caches": self.kv_bytes,
            "gathered KV": self.gathered_bytes,
            "communicators": self.communicators_bytes,
            "driver": self.driver_bytes,
            "process": self.process_bytes,
        }


@dataclass(frozen=True)
class Limits:
    """The memory there is, in bytes: the host's, and of one device of each side (None: the side
    computes on the CPU).
    """

    host: int
    attention: int | None = None
    expert: int | None = None

    def device(self, role: Role) -> int | None:
        return self.attention if role == "attention" else self.expert


@dataclass(frozen=True)
class Layout:
    """Everything that memory depends on, but for the longest prompt.

    window_tokens: most tokens of one dispatch of a group. Its members divide them. placed: instance
    and rank of all that are on this node; by default, one instance whole. controllers: how many of
    them are on this node.
    """

    config: ModelConfig
    schedule: Schedule
    groups: int
    experts: tuple[range, ...]
    window_tokens: int
    dtype_bytes: int
    keep_kv: bool
    wiring: Wiring
    placed: tuple[tuple[int, RankId], ...] | None = None
    controllers: int = 1

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        schedule: Schedule,
        groups: int,
        ranks: int,
        window_tokens: int,
        dtype_bytes: int,
        keep_kv: bool,
        wiring: Wiring,
    ) -> "Layout":
        """Places the experts; ValueError when `ranks` is more than there are."""
        experts = place_experts(config.experts, ranks)
        return cls(config, schedule, groups, experts, window_tokens, dtype_bytes, keep_kv, wiring)

    @property
    def members(self) -> int:
        return self.wiring.tensor_parallel

    @property
    def attention_ranks(self) -> int:
        return self.groups * self.members

    @property
    def senders(self) -> int:
        """How many attention ranks' dispatches make up one work item."""
        return self.attention_ranks if self.schedule.in_lockstep else self.members

    @property
    def window_rows(self) -> int:
        """Most rows that one member dispatches at once."""
        return most_rows(self.window_tokens, self.members)

    @property
    def windows(self) -> tuple[WindowShape, ...]:
        """The shape of the windows to each expert rank."""
        return tuple(
            WindowShape(
                rows=self.window_rows,
                hidden=self.config.hidden_size,
                top_k=self.config.top_k,
                local_experts=len(experts),
                payload_bytes=self.dtype_bytes,
                lanes=self.schedule.lanes,
            )
            for experts in self.experts
        )

    @property
    def message_bytes(self) -> int:
        """The largest dispatch to one expert rank."""
        return max(window.out_at for window in self.windows)

    @property
    def windows_bytes(self) -> int:
        """Of all windows of an instance, where they lie in the host's memory."""
        copies = 1 if self.wiring.transport == "shm" else 2
        return copies * self.attention_ranks * sum(window.total_bytes for window in self.windows)

    @property
    def largest_windows(self) -> dict[Role, int]:
        """Of all windows of one rank, where each end has its own."""
        sizes = [window.total_bytes for window in self.windows]
        return {"attention": sum(sizes), "expert": self.attention_ranks * max(sizes)}

    def ranks(self, longest: int) -> tuple[RankPlan, ...]:
        """An instance's ranks, attention first, where no prompt has more than `longest` tokens."""
        return (*self._attention(longest), *self._experts())

    def here(self, longest: int) -> tuple[tuple[int, RankPlan], ...]:
        """The ranks of all instances that are on this node, each with its instance."""
        ranks = self.ranks(longest)
        if self.placed is None:
            return tuple((0, rank) for rank in ranks)
        known = {rank.id: rank for rank in ranks}
        return tuple((instance, known[id_]) for instance, id_ in self.placed)

    @property
    def instances_here(self) -> int:
        """How many instances have ranks on this node."""
        return 1 if self.placed is None else len({instance for instance, _ in self.placed})

    @property
    def processes_here(self) -> dict[Role, int]:
        """How many ranks are on this node."""
        if self.placed is None:
            return {"attention": self.attention_ranks, "expert": len(self.experts)}
        roles = [id_.role for _, id_ in self.placed]
        return {"attention": roles.count("attention"), "expert": roles.count("expert")}

    @property
    def base_bytes(self) -> int:
        """What is there besides ranks."""
        return BASE_BYTES + max(0, self.controllers - 1) * PROCESS_BYTES

    def host_bytes(self, longest: int) -> int:
        """What all that is on this node needs of the host's memory."""
        return self.base_bytes + sum(rank.host_bytes for _, rank in self.here(longest))

    def fits(self, longest: int, limits: Limits) -> bool:
        ranks = [rank for _, rank in self.here(longest)]
        return self.base_bytes + sum(rank.host_bytes for rank in ranks) <= limits.host and not any(
            limit is not None and rank.device_bytes > limit
            for rank in ranks
            for limit in (limits.device(rank.id.role),)
        )

    def _attention(self, longest: int) -> list[RankPlan]:
        exclusive = self.schedule.exclusive_tokens
        ordinary = max(self.schedule.batch_limit, min(longest, exclusive))
        lanes = self.schedule.lanes
        tokens = lanes * ordinary
        working_set = lanes * self._attention_working_set(ordinary)
        if longest > exclusive:  # such a prompt has its group to itself
            tokens = max(tokens, longest)
            working_set = max(working_set, self._attention_working_set(longest))
        if self.schedule.cuts_prompts:  # one that is cut is kept from batch to batch
            tokens += longest
        sizes = [window.total_bytes for window in self.windows]
        plan = RankPlan(
            id=RankId("attention", 0),
            experts=range(0),
            weights_bytes=self._weights("attention", 0),
            windows_bytes=0 if self.wiring.transport == "shm" else sum(sizes),
            working_set_bytes=working_set + self._staging("attention", max(sizes)),
            kv_bytes=tokens * self._kv_per_token(self.members),
            communicators_bytes=2 * len(sizes) * self.wiring.communicator_bytes,
        )
        member = self._placed(plan)
        first = dataclasses.replace(member, gathered_bytes=self._gathered_kv(longest))
        return [
            dataclasses.replace(
                member if rank % self.members else first, id=RankId("attention", rank)
            )
            for rank in range(self.attention_ranks)
        ]

    def _experts(self) -> list[RankPlan]:
        rows = self.window_rows * self.senders
        working_set = working_set_bytes(self.config, "expert", rows, self.dtype_bytes)
        if self.senders > 1:
            working_set += 2 * rows * self.config.hidden_size * self.dtype_bytes
        return [
            self._placed(
                RankPlan(
                    id=RankId("expert", rank),
                    experts=experts,
                    weights_bytes=self._weights("expert", len(experts)),
                    windows_bytes=self.attention_ranks * window.total_bytes,
                    working_set_bytes=working_set
                    + self._grouped(rows, window)
                    + self._staging("expert", window.total_bytes),
                    kv_bytes=0,
                    communicators_bytes=2 * self.attention_ranks * self.wiring.communicator_bytes,
                )
            )
            for rank, (experts, window) in enumerate(zip(self.experts, self.windows, strict=True))
        ]

    def _weights(self, role: Role, experts: int) -> int:
        if self.wiring.paced:
            return 0
        size = self.members if role == "attention" else 1
        return weight_bytes(self.config, role, experts, self.dtype_bytes, size=size)

    def _grouped(self, rows: int, window: WindowShape) -> int:
        """What a device needs to compute all experts of a work item at once."""
        kind = self.wiring.kind("expert")
        if kind == "cpu":
            return 0
        pairs = self.senders * window.pairs
        sizes = self.config.hidden_size, self.config.expert_intermediate, self.dtype_bytes
        kernel = grouped_mlp.workspace_bytes(rows, pairs, window.local_experts, *sizes)
        if kind == "npu":  # whichever of the two it will have
            return max(kernel, npu_operators.workspace_bytes(rows, pairs, *sizes))
        return kernel

    def _placed(self, rank: RankPlan) -> RankPlan:
        """Adds what a rank has because of where it computes."""
        if rank.id.role == "attention":
            size = rank.communicators_bytes + self.wiring.team_bytes
            rank = dataclasses.replace(rank, communicators_bytes=size)
        if self.wiring.kind(rank.id.role) == "cpu":
            return dataclasses.replace(rank, paced=self.wiring.paced)
        return dataclasses.replace(
            rank,
            process_bytes=DRIVER_HOST_BYTES,
            driver_bytes=DRIVER_BYTES,
            on_device=_ON_DEVICE | {"windows"} if self.wiring.on_device else _ON_DEVICE,
        )

    def _attention_working_set(self, tokens: int) -> int:
        return working_set_bytes(
            self.config, "attention", tokens, self.dtype_bytes, size=self.members
        )

    def _kv_per_token(self, members: int) -> int:
        """What one of `members` keeps of a token."""
        if not (self.keep_kv or self.schedule.cuts_prompts):
            return 0
        return kv_bytes_per_token(self.config, self.dtype_bytes, size=members)

    def _gathered_kv(self, longest: int) -> int:
        """Where heads are divided, a prompt's cache is put together in the host's memory, on the
        first member.
        """
        divided = (
            self.keep_kv and self.members > 1 and isinstance(self.config.attention, GroupedQuery)
        )
        return longest * self._kv_per_token(1) if divided else 0

    def _staging(self, role: Role, window_bytes: int) -> int:
        """On a device whose windows lie in the host's memory, copies of one of them."""
        on_host = self.wiring.kind(role) != "cpu" and not self.wiring.on_device
        return window_bytes if on_host else 0


def show_bytes(size: int) -> str:
    """1.5 GiB, 12 MiB, 800 KiB: three digits or so, for people."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}" if value < 10 and unit != "B" else f"{value:.0f} {unit}"


def show_device_bytes(size: int) -> str:
    """82 GB, 5.2 GB, 12 MB: in 10^9 or 10^6 bytes, as the memory of devices is given."""
    value = size / 1e9
    if value < 0.1:
        return f"{size / 1e6:.0f} MB"
    return f"{value:.1f} GB" if value < 10 else f"{value:.0f} GB"
