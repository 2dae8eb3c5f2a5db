"""The choices of a plan: how many groups and ranks, how large windows, how long prompts."""

import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from engine.launch.accelerators import Kind
from engine.launch.budget import Layout, show_bytes, show_device_bytes
from engine.launch.resources import ROLES, UNLIMITED, Resources
from engine.launch.shortage import device_shortages, fullest_bytes, host_shortage
from engine.launch.wiring import wiring_problems
from engine.model.architecture import ModelConfig
from engine.model.sharding import problems as shard_problems
from engine.topology.nodes import Placement, place
from engine.topology.ranks import Role
from engine.topology.schema import MOST_PEERS, Topology

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# "auto" stops here: windows grow with groups times ranks. A topology may ask for more.
AUTO_PROCESSES = 8
AUTO_WINDOW_SHARE = 8  # automatic windows take at most an eighth of the memory
LEAST_WINDOW = 64
FILES_PER_PROCESS = 8
# Sockets of a communicator: one each way, and one that waits for the peer.
FILES_PER_COMMUNICATOR = 3


@dataclass
class Planner:
    """Makes the choices one after another, and writes down what is wrong or worth saying."""

    topology: Topology
    config: ModelConfig
    keep_kv: bool
    resources: Resources
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        schedule = self.topology.schedule
        if schedule.in_lockstep:  # a group has one batch of a step
            schedule = msgspec.structs.replace(schedule, lanes=1)
            self.topology = msgspec.structs.replace(self.topology, schedule=schedule)
        self.wiring = self.resources.wiring
        self.limits = self.resources.limits
        self.machine = self.resources.machine
        self.assume = self.resources.assume
        self.node = self.resources.node
        self.instances = self.resources.instances

    @property
    def dtype(self) -> str:
        wanted = self.topology.model.dtype
        if wanted != "auto":
            return wanted
        on_cpu = self.wiring.attention == self.wiring.experts == "cpu"
        return "float32" if on_cpu else self.config.torch_dtype

    def choose_layout(self) -> Layout | None:
        """Groups, ranks and windows; None when the numbers asked for are impossible."""
        if self._refuse_auto():
            return None
        groups, ranks = self._counts()
        if self._refuse_counts(groups, ranks):
            return None
        layout = self._layout(groups, ranks)
        asked = groups, ranks
        may_shrink = (
            self.topology.attention.groups == "auto" and self.wiring.attention == "cpu",
            self.topology.experts.ranks == "auto" and self.wiring.experts == "cpu",
        )
        while layout.host_bytes(self._shortest_limit) > self.limits.host:
            if self.topology.schedule.is_colocated:
                if not all(may_shrink) or groups == 1:
                    break
                groups, ranks = groups - 1, ranks - self.wiring.tensor_parallel
            elif may_shrink[0] and groups > 1 and (groups >= ranks or not may_shrink[1]):
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
        layout = self._enough_ranks(layout)
        self._note_layout(layout)
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
        if short := self._shortages(layout, least):
            self.problems += short
            return None
        limit = own if asked == "auto" else asked
        fits = _largest(least, limit, lambda longest: layout.fits(longest, self.limits))
        if asked == "auto":
            text = f"prompts of up to {fits} tokens, "
            if fits == limit:
                text += "the model's own limit"
            else:
                text += f"which is what fits in {self._memory(layout, fits + 1)} "
                text += f"(the model's own limit is {own})"
            if self.node.node_rank > 0:
                text += ", unless node 0 decides for less"
            self.notes.append(text)
        if asked == "auto" or fits == limit:
            return fits
        need, there = self._need(layout, asked)
        self.problems.append(
            f"{where}: prompts of {asked} tokens need {need} and {there}; "
            f"{fits} is the most that fits"
        )
        return None

    def resolved(self, layout: Layout, longest: int) -> Topology:
        change = msgspec.structs.replace
        old = self.topology
        tokens = layout.window_tokens
        return change(
            old,
            model=change(old.model, dtype=self.dtype, max_model_len=longest),
            attention=change(old.attention, groups=layout.groups, threads=1),
            experts=change(old.experts, ranks=len(layout.experts), threads=1),
            comm=change(old.comm, transport=self.wiring.transport, window_tokens=tokens),
        )

    def placement(self, groups: int, ranks: int) -> Placement:
        """Raises ValueError where that is impossible."""
        if self.assume == "everything":  # keys are missing that were wrong, so it proves nothing
            return place(groups, self.wiring.tensor_parallel, ranks)
        return place(
            groups,
            self.wiring.tensor_parallel,
            ranks,
            self.instances,
            self.node.nnodes,
            self.topology.nodes,
        )

    @property
    def _shortest_limit(self) -> int:
        """Memory does not shrink with a limit below this: batches hold as many tokens anyway."""
        asked = self.topology.model.max_model_len
        limit = self.config.max_position_embeddings if asked == "auto" else asked
        return min(limit, self.topology.schedule.batch_limit)

    def _counts(self) -> tuple[int, int]:
        """Groups and ranks, where "auto" divides the devices that a side computes on; of those that
        both compute on, attention gets the odd one. Cores are not divided: each side has as many
        ranks as there are cores, and whichever has work to do runs. Where an attention rank and an
        expert rank stand for one device, there are as many of each.
        """
        asked_groups, asked_ranks = self.topology.attention.groups, self.topology.experts.ranks
        attention, experts = self.wiring.attention, self.wiring.experts
        members = self.wiring.tensor_parallel
        if self.topology.schedule.is_colocated:
            pairs = min(_clamped(self._places(attention), attention), self.config.experts)
            pairs = pairs if asked_ranks == "auto" else asked_ranks
            groups = max(1, pairs // members) if asked_groups == "auto" else asked_groups
            return groups, groups * members if asked_ranks == "auto" else asked_ranks
        shared = attention == experts != "cpu"
        if asked_groups != "auto":
            groups = asked_groups
        else:
            mine = self._places(attention)
            if shared:
                mine -= mine // 2 if asked_ranks == "auto" else asked_ranks
            groups = _clamped(mine // members, attention)
        if asked_ranks != "auto":
            return groups, asked_ranks
        left = self._places(experts) - (groups * members if shared else 0)
        return groups, min(_clamped(left, experts), self.config.experts)

    def _places(self, kind: Kind) -> int:
        """An instance's share of the cores or devices."""
        return self.resources.places(kind) // self.instances

    def _refuse_auto(self) -> bool:
        """With several nodes, nothing may depend on one of them. (Windows then hold a batch.)"""
        if self.node.nnodes == 1 or self.assume == "everything":
            return False
        before = len(self.problems)
        topology = self.topology
        for section, key, value in (
            ("attention", "groups", topology.attention.groups),
            ("experts", "ranks", topology.experts.ranks),
        ):
            if value == "auto":
                self.problems.append(
                    f'{topology.where(section, key)}: "auto" divides what one node has, and this '
                    f"launch has {self.node.nnodes}; set a number"
                )
        if len(self.problems) > before:
            self.problems += wiring_problems(topology, self.node.nnodes)
        return len(self.problems) > before

    def _refuse_counts(self, groups: int, ranks: int) -> bool:
        before = len(self.problems)
        self.problems += wiring_problems(self.topology, self.node.nnodes)
        members = self.wiring.tensor_parallel
        where_members = self.topology.where("attention", "tensor_parallel")
        self.problems += [
            f"{where_members}: {text}" for text in shard_problems(self.config, members)
        ]
        where_ranks = self.topology.where("experts", "ranks")
        if ranks > self.config.experts:
            self.problems.append(
                f"{where_ranks}: {ranks} ranks for {self.config.experts} experts leave some "
                f"without any; at most {self.config.experts}"
            )
        where_groups = self.topology.where("attention", "groups")
        if groups <= MOST_PEERS < groups * members:
            self.problems.append(
                f"{where_groups}: {groups} groups of {members} ranks are too many; at most "
                f"{MOST_PEERS} ranks"
            )
        for where, count in ((where_groups, groups), (where_ranks, ranks)):
            if count > MOST_PEERS:
                self.problems.append(f"{where}: {count} is too many; at most {MOST_PEERS}")
        if self.topology.schedule.is_colocated:
            self.problems += self._colocation_problems(groups * members, ranks)
        here = self._check_placement(groups, ranks)
        self._check_files(groups * members, ranks, here)
        return len(self.problems) > before

    def _colocation_problems(self, attention: int, ranks: int) -> list[str]:
        where, policy = self.topology.where("schedule", "policy"), self.topology.schedule.policy
        problems = []
        if ranks != attention:
            problems.append(
                f"{self.topology.where('experts', 'ranks')}: {policy} has one expert rank on each "
                f'attention rank\'s device; set {attention} or "auto", not {ranks}'
            )
        if self.node.nnodes > 1:
            problems.append(f"{where}: {policy} runs on one node only; take sync-afd")
        return problems

    def _check_placement(self, groups: int, ranks: int) -> int:
        """How many ranks are on this node."""
        try:
            return len(self.placement(groups, ranks).ranks_on(self._node_rank))
        except ValueError as error:
            named, nnodes = len(self.topology.nodes), self.node.nnodes
            text = f"{self.topology.source}: {error}"
            if named and named != max(1, nnodes // self.instances):
                text += f"; run it with --nnodes {named * self.instances}, or change [[nodes]]"
            self.problems.append(text)
            return 0

    @property
    def _node_rank(self) -> int:
        return 0 if self.assume == "everything" else self.node.node_rank

    def _check_files(self, attention: int, ranks: int, here: int) -> None:
        """No process may have more files open than are allowed."""
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        files = FILES_PER_PROCESS * here
        if self.wiring.transport == "shm":
            files += attention * ranks
            what = f"{attention} x {ranks} windows"
        else:
            files += 2 * FILES_PER_COMMUNICATOR * max(attention, ranks)
            what = f"communicators with {max(attention, ranks)} ranks"
        if self.assume != "nothing" or allowed == resource.RLIM_INFINITY or files <= allowed:
            return
        self.problems.append(
            f"{self.topology.where('experts', 'ranks')}: {what} need {files} open files and "
            f"{allowed} are allowed; lower groups or ranks, or raise the limit (ulimit -n {files})"
        )

    def _layout(self, groups: int, ranks: int, placed: bool = True) -> Layout:
        """placed: on the nodes; otherwise as one instance on this one."""
        asked = self.topology.comm.window_tokens
        tokens = self.topology.schedule.batch_limit if asked == "auto" else asked
        layout = self._layout_with(groups, ranks, tokens, placed)
        may_shrink = asked == "auto" and self.node.nnodes == 1
        while may_shrink and self._large_windows(layout) and tokens > LEAST_WINDOW:
            tokens = max(LEAST_WINDOW, tokens // 2)
            layout = self._layout_with(groups, ranks, tokens, placed)
        return layout

    def _large_windows(self, layout: Layout) -> bool:
        """Whether windows take more than their share of the memory they lie in."""
        if not self.wiring.on_device:
            windows = layout.windows_bytes * self.instances
            return windows > self.limits.host // AUTO_WINDOW_SHARE
        return any(
            size > (self.limits.device(role) or UNLIMITED) // AUTO_WINDOW_SHARE
            for role, size in layout.largest_windows.items()
        )

    def _layout_with(
        self, groups: int, ranks: int, window_tokens: int, placed: bool = True
    ) -> Layout:
        layout = Layout.build(
            config=self.config,
            schedule=self.topology.schedule,
            groups=groups,
            ranks=ranks,
            window_tokens=window_tokens,
            dtype_bytes=DTYPE_BYTES[self.dtype],
            keep_kv=self.keep_kv,
            wiring=self.wiring,
        )
        if placed:
            ranks_here = self.placement(groups, ranks).ranks_on(self._node_rank)
            controllers = self.instances if self.node.node_rank == 0 else 0
            layout = replace(layout, placed=tuple(ranks_here), controllers=controllers)
        return self.resources.wired(layout)

    def _enough_ranks(self, layout: Layout) -> Layout:
        """Where devices are assumed, "auto" is as many expert ranks as need be."""
        if (
            self.assume == "devices"
            and self.topology.experts.ranks == "auto"
            and self.limits.expert is not None
        ):
            ranks, most = len(layout.experts), min(self.config.experts, MOST_PEERS)
            least = self._shortest_limit
            while fullest_bytes(layout, "expert", least) > self.limits.expert:
                if ranks == most:
                    break
                ranks += 1
                layout = self._layout(layout.groups, ranks)
        return layout

    def _note_layout(self, layout: Layout) -> None:
        if self.topology.comm.window_tokens == "auto" and (
            layout.window_tokens < self.topology.schedule.batch_limit
        ):
            self.notes.append(
                f"windows of {layout.window_tokens} tokens: a batch goes in several dispatches, so "
                "that windows take no more than their share of memory"
            )
        counts = layout.processes_here
        processes = sum(counts[role] for role in ROLES if self.wiring.kind(role) == "cpu")
        chosen = "auto" in (self.topology.attention.groups, self.topology.experts.ranks)
        if processes > self.machine.cores and self.assume == "nothing" and not chosen:
            self.notes.append(
                f"{processes} ranks of one thread share {_count(self.machine.cores, 'core')}, so "
                "some take turns"
            )

    def _shortages(self, layout: Layout, longest: int) -> list[str]:
        found = []
        if layout.host_bytes(longest) > self.limits.host:
            whose = self.machine.memory_limit
            found.append(
                host_shortage(self.topology, layout, longest, self.limits, whose, self.dtype)
            )

        def rebuild(ranks: int) -> Layout:
            return self._layout(layout.groups, ranks, placed=False)

        return found + device_shortages(self.topology, layout, longest, self.limits, rebuild)

    def _tight(self, layout: Layout, longest: int) -> Role | None:
        """Whose devices are too small for prompts of that length; None: it is the host."""
        if layout.host_bytes(longest) > self.limits.host:
            return None
        return next(
            role
            for role in ROLES
            if fullest_bytes(layout, role, longest) > (self.limits.device(role) or UNLIMITED)
        )

    def _memory(self, layout: Layout, longest: int) -> str:
        """What keeps prompts from being `longest` tokens long."""
        role = self._tight(layout, longest)
        if role is None:
            return f"{show_bytes(self.limits.host)} of memory"
        limit = self.limits.device(role)
        assert limit is not None
        return f"{show_device_bytes(limit)} of a device's memory"

    def _need(self, layout: Layout, longest: int) -> tuple[str, str]:
        role = self._tight(layout, longest)
        if role is None:
            need = f"{show_bytes(layout.host_bytes(longest))} of memory"
            return need, f"{self.machine.memory_limit} has {show_bytes(self.limits.host)} free"
        limit = self.limits.device(role)
        assert limit is not None
        need = show_device_bytes(fullest_bytes(layout, role, longest))
        return f"{need} of a device's memory", f"each has {show_device_bytes(limit)}"


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number of low..high for which `holds`; it holds for low, and below any other."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _clamped(count: int, kind: Kind) -> int:
    return max(1, min(count, AUTO_PROCESSES if kind == "cpu" else MOST_PEERS))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
