"""The choices of a plan: how many groups and ranks, how large windows, how long prompts."""

import resource
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.launch.budget import BASE_BYTES, Layout, show_bytes
from engine.launch.machine import Machine
from engine.model.architecture import ModelConfig
from engine.topology.schema import MOST_PEERS, Topology

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# "auto" stops here: windows grow with groups times ranks. A topology may ask for more.
AUTO_PROCESSES = 8
AUTO_WINDOW_SHARE = 8  # automatic windows take at most an eighth of the memory
LEAST_WINDOW = 64
FILES_PER_PROCESS = 8


@dataclass
class Planner:
    """Makes the choices one after another, and writes down what is wrong or worth saying."""

    topology: Topology
    config: ModelConfig
    keep_kv: bool
    machine: Machine
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        wanted = self.topology.model.dtype
        return "float32" if wanted == "auto" else wanted

    def choose_layout(self) -> Layout | None:
        """Groups, ranks and windows; None when the numbers asked for are impossible."""
        groups, ranks = self._counts()
        if self._refuse_counts(groups, ranks):
            return None
        layout = self._layout(groups, ranks)
        asked = groups, ranks
        may_shrink = (
            self.topology.attention.groups == "auto",
            self.topology.experts.ranks == "auto",
        )
        while layout.total(self._shortest_limit) > self.machine.memory_bytes:
            if may_shrink[0] and groups > 1 and (groups >= ranks or not may_shrink[1]):
                groups -= 1
            elif may_shrink[1] and ranks > 1:
                ranks -= 1
            else:
                break
            layout = self._layout(groups, ranks)
        if (groups, ranks) != asked:
            self.notes.append(
                f"{_count(groups, 'attention group')} and {_count(ranks, 'expert rank')} instead "
                f"of {asked[0]} and {asked[1]}: memory has no room for more"
            )
        if self.topology.comm.window_tokens == "auto" and (
            layout.window_tokens < self.topology.schedule.max_batch_tokens
        ):
            self.notes.append(
                f"windows of {layout.window_tokens} tokens: a batch goes in several dispatches, so "
                "that windows take no more than their share of memory"
            )
        processes = groups + ranks
        if processes > self.machine.cores:
            self.notes.append(
                f"{processes} ranks of one thread share {_count(self.machine.cores, 'core')}, so "
                "some take turns"
            )
        return layout

    def choose_longest(self, layout: Layout | None) -> int | None:
        """The longest prompt, in tokens; None when it does not fit."""
        own, asked = self.config.max_position_embeddings, self.topology.model.max_model_len
        where = self.topology.where("model", "max_model_len")
        if asked != "auto" and asked > own:
            self.problems.append(
                f"{where}: {asked} is more than the model's own limit, {own}; lower it"
            )
            return None
        if layout is None:
            return None
        least = self._shortest_limit
        memory = self.machine.memory_bytes
        if layout.total(least) > memory:
            self.problems.append(self._too_little_memory(layout, least))
            return None
        limit = own if asked == "auto" else asked
        fits = _largest(least, limit, lambda longest: layout.total(longest) <= memory)
        if fits == limit:
            if asked == "auto":
                self.notes.append(f"prompts of up to {own} tokens, the model's own limit")
            return limit
        if asked == "auto":
            self.notes.append(
                f"prompts of up to {fits} tokens, which is what fits in "
                f"{show_bytes(memory)} of memory (the model's own limit is {own})"
            )
            return fits
        self.problems.append(
            f"{where}: prompts of {asked} tokens need {show_bytes(layout.total(asked))} of memory "
            f"and {self.machine.memory_limit} has {show_bytes(memory)} free; "
            f"{fits} is the most that fits"
        )
        return None

    def resolved(self, layout: Layout, longest: int) -> Topology:
        replace = msgspec.structs.replace
        old = self.topology
        return replace(
            old,
            model=replace(old.model, dtype=self.dtype, max_model_len=longest),
            attention=replace(old.attention, groups=layout.groups, threads=1),
            experts=replace(old.experts, ranks=len(layout.experts), threads=1),
            comm=replace(old.comm, transport="shm", window_tokens=layout.window_tokens),
        )

    @property
    def _shortest_limit(self) -> int:
        """Memory does not shrink with a limit below this: batches hold as many tokens anyway."""
        asked = self.topology.model.max_model_len
        limit = self.config.max_position_embeddings if asked == "auto" else asked
        return min(limit, self.topology.schedule.max_batch_tokens)

    def _counts(self) -> tuple[int, int]:
        """Groups and ranks, where "auto" divides the cores; attention gets the odd one."""
        asked_groups, asked_ranks = self.topology.attention.groups, self.topology.experts.ranks
        cores = self.machine.cores
        if asked_groups != "auto":
            groups = asked_groups
        elif asked_ranks != "auto":
            groups = _clamped(cores - asked_ranks)
        else:
            groups = _clamped(cores - cores // 2)
        if asked_ranks != "auto":
            return groups, asked_ranks
        others = cores - cores // 2 if asked_groups == "auto" else groups
        return groups, min(_clamped(cores - others), self.config.experts)

    def _refuse_counts(self, groups: int, ranks: int) -> bool:
        before = len(self.problems)
        where_ranks = self.topology.where("experts", "ranks")
        if ranks > self.config.experts:
            self.problems.append(
                f"{where_ranks}: {ranks} ranks for {self.config.experts} experts leave some "
                f"without any; at most {self.config.experts}"
            )
        for where, count in (
            (self.topology.where("attention", "groups"), groups),
            (where_ranks, ranks),
        ):
            if count > MOST_PEERS:
                self.problems.append(f"{where}: {count} is too many; at most {MOST_PEERS}")
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        files = groups * ranks + FILES_PER_PROCESS * (groups + ranks)
        if allowed != resource.RLIM_INFINITY and files > allowed:
            self.problems.append(
                f"{where_ranks}: {groups} x {ranks} windows need {files} open files and {allowed} "
                f"are allowed; lower groups or ranks, or raise the limit (ulimit -n {files})"
            )
        return len(self.problems) > before

    def _layout(self, groups: int, ranks: int) -> Layout:
        asked = self.topology.comm.window_tokens
        tokens = self.topology.schedule.max_batch_tokens if asked == "auto" else asked
        layout = self._layout_with(groups, ranks, tokens)
        share = self.machine.memory_bytes // AUTO_WINDOW_SHARE
        while asked == "auto" and layout.windows_bytes > share and tokens > LEAST_WINDOW:
            tokens = max(LEAST_WINDOW, tokens // 2)
            layout = self._layout_with(groups, ranks, tokens)
        return layout

    def _layout_with(self, groups: int, ranks: int, window_tokens: int) -> Layout:
        return Layout.build(
            config=self.config,
            schedule=self.topology.schedule,
            groups=groups,
            ranks=ranks,
            window_tokens=window_tokens,
            dtype_bytes=DTYPE_BYTES[self.dtype],
            keep_kv=self.keep_kv,
        )

    def _too_little_memory(self, layout: Layout, longest: int) -> str:
        ranks = layout.ranks(longest)
        working_set = {"attention": 0, "expert": 0}
        for rank in ranks:
            working_set[rank.id.role] += rank.working_set_bytes
        parts = {
            "weights": sum(rank.weights_bytes for rank in ranks),
            "windows": sum(rank.windows_bytes for rank in ranks),
            "attention's working sets": working_set["attention"],
            "experts' working sets": working_set["expert"],
            "KV caches": sum(rank.kv_bytes for rank in ranks),
            "processes": BASE_BYTES + sum(rank.process_bytes for rank in ranks),
        }
        remedies = {
            "weights": "take a smaller model"
            + (", dtype bfloat16" if self.dtype == "float32" else "")
            + (" or fewer attention groups" if layout.groups > 1 else ""),
            "windows": "lower [comm] window_tokens or [schedule] lanes",
            "attention's working sets": "lower [schedule] max_batch_tokens or lanes",
            "experts' working sets": "lower [comm] window_tokens",
            "KV caches": "lower [schedule] max_batch_tokens or lanes, or do not export the caches",
            "processes": "lower [attention] groups or [experts] ranks, or free some memory",
        }
        largest = max(parts, key=lambda part: parts[part])
        listed = ", ".join(f"{part} {show_bytes(size)}" for part, size in parts.items() if size)
        return (
            f"{self.topology.source}: needs {show_bytes(layout.total(longest))} of memory and "
            f"{self.machine.memory_limit} has {show_bytes(self.machine.memory_bytes)} free "
            f"({listed}); {remedies[largest]}"
        )


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number of low..high for which `holds`; it holds for low, and below any other."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _clamped(count: int) -> int:
    return max(1, min(count, AUTO_PROCESSES))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
