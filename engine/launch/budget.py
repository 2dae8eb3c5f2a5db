"""How much memory the ranks of a layout need: pure arithmetic over the model's sizes."""

from dataclasses import dataclass

from engine.comm.layout import WindowShape
from engine.model.architecture import ModelConfig
from engine.model.sizes import kv_bytes_per_token, weight_bytes, working_set_bytes
from engine.topology.placement import place_experts
from engine.topology.ranks import RankId, Role
from engine.topology.schema import Schedule

# Measured with torch 2.13 for CPU: what a forked rank comes to own besides what it is planned
# for, and what the command, the zygote and the controller take together.
PROCESS_BYTES = 48 * 2**20
BASE_BYTES = 448 * 2**20


@dataclass(frozen=True)
class RankPlan:
    """The memory of one rank, in bytes. Windows are shared; the expert side is charged for them.

    working_set_bytes: activations at their peak. kv_bytes: caches that are kept to be exported.
    """

    id: RankId
    experts: range
    weights_bytes: int
    windows_bytes: int
    working_set_bytes: int
    kv_bytes: int
    process_bytes: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        parts = (self.weights_bytes, self.windows_bytes, self.working_set_bytes, self.kv_bytes)
        return sum(parts) + self.process_bytes


@dataclass(frozen=True)
class Layout:
    """Everything that memory depends on, but for the longest prompt."""

    config: ModelConfig
    schedule: Schedule
    groups: int
    experts: tuple[range, ...]
    window_tokens: int
    dtype_bytes: int
    keep_kv: bool

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
    ) -> "Layout":
        """Places the experts; ValueError when `ranks` is more than there are."""
        experts = place_experts(config.experts, ranks)
        return cls(config, schedule, groups, experts, window_tokens, dtype_bytes, keep_kv)

    @property
    def windows(self) -> tuple[WindowShape, ...]:
        """The shape of the windows to each expert rank."""
        return tuple(
            WindowShape(
                rows=self.window_tokens,
                hidden=self.config.hidden_size,
                top_k=self.config.top_k,
                local_experts=len(experts),
                payload_bytes=self.dtype_bytes,
                lanes=self.schedule.lanes,
            )
            for experts in self.experts
        )

    @property
    def windows_bytes(self) -> int:
        return self.groups * sum(window.total_bytes for window in self.windows)

    def ranks(self, longest: int) -> tuple[RankPlan, ...]:
        """The ranks, attention first, where no prompt has more than `longest` tokens."""
        return (*self._attention(longest), *self._experts())

    def total(self, longest: int) -> int:
        """Bytes that the whole instance needs."""
        return BASE_BYTES + sum(rank.total for rank in self.ranks(longest))

    def _attention(self, longest: int) -> list[RankPlan]:
        exclusive = self.schedule.exclusive_tokens
        ordinary = max(self.schedule.max_batch_tokens, min(longest, exclusive))
        lanes = self.schedule.lanes
        tokens = lanes * ordinary
        working_set = lanes * self._working_set("attention", ordinary)
        if longest > exclusive:  # such a prompt has its group to itself
            tokens = max(tokens, longest)
            working_set = max(working_set, self._working_set("attention", longest))
        per_token = kv_bytes_per_token(self.config, self.dtype_bytes) if self.keep_kv else 0
        weights = weight_bytes(self.config, "attention", 0, self.dtype_bytes)
        return [
            RankPlan(
                id=RankId("attention", group),
                experts=range(0),
                weights_bytes=weights,
                windows_bytes=0,
                working_set_bytes=working_set,
                kv_bytes=tokens * per_token,
            )
            for group in range(self.groups)
        ]

    def _experts(self) -> list[RankPlan]:
        working_set = self._working_set("expert", self.window_tokens)
        return [
            RankPlan(
                id=RankId("expert", rank),
                experts=experts,
                weights_bytes=weight_bytes(self.config, "expert", len(experts), self.dtype_bytes),
                windows_bytes=self.groups * window.total_bytes,
                working_set_bytes=working_set,
                kv_bytes=0,
            )
            for rank, (experts, window) in enumerate(zip(self.experts, self.windows, strict=True))
        ]

    def _working_set(self, role: Role, tokens: int) -> int:
        return working_set_bytes(self.config, role, tokens, self.dtype_bytes)


def show_bytes(size: int) -> str:
    """1.5 GiB, 12 MiB, 800 KiB: three digits or so, for people."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}" if value < 10 and unit != "B" else f"{value:.0f} {unit}"
