"""Which accelerators there are, which of them the user's mask shows, and which rank gets which.

No device is touched here, so that the processes that fork ranks stay clean: devices are counted by
their files in /dev, and their memory is what nvidia-smi or npu-smi says.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from engine.echo import plain
from engine.errors import UsageError
from engine.topology import schema

Kind: TypeAlias = schema.Kind

MASKS: dict[Kind, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
NODES: dict[Kind, re.Pattern[str]] = {
    "cuda": re.compile(r"nvidia\d+"),
    "npu": re.compile(r"davinci\d+"),
}
_TOOL_TIMEOUT_S = 20.0
_MIB = 1 << 20
_NAMED = ("GPU-", "MIG-")  # UUIDs of devices, and of parts of them
_NUMBER = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class Accelerators:
    """The devices of one kind.

    present: how many this machine (or container) has. visible: those that the mask leaves, as a
    mask spells them. memory_bytes: the smallest one's total; None where nobody says. mask: the
    user's mask, None without one.
    """

    kind: Kind
    present: int
    visible: tuple[str, ...]
    memory_bytes: int | None
    mask: str | None


@dataclass(frozen=True)
class Slot:
    """One device for one rank. index: its place among the visible ones. visible: as in a mask."""

    kind: Kind
    index: int
    visible: str


def read_accelerators(
    kind: Kind, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Accelerators:
    """What there is of `kind` ("cpu": nothing). root: where /dev lies.

    Raises UsageError for a mask that cannot be: a device that is not there or comes twice, and on
    Ascend an order that does not ascend.
    """
    if kind == "cpu":
        return Accelerators(kind, 0, (), None, None)
    present = count_nodes(kind, root)
    tool: list[tuple[str, int]] = []
    if kind == "cuda" and (present or (root / "dev/dxg").exists()):
        tool = _ask_nvidia_smi(environ)
        present = present or len(tool)  # Windows' Linux subsystem has no file a device
    elif kind == "npu" and present:
        tool = _ask_npu_smi(environ)
    mask = environ.get(MASKS[kind])
    if mask is None:
        visible = tuple(str(index) for index in range(present))
    elif kind == "cuda":
        visible = _cuda_mask(mask, present, [name for name, _ in tool])
    else:
        visible = _ascend_mask(mask, present)
    return Accelerators(kind, present, visible, _least_memory(kind, visible, tool, environ), mask)


def assumed(kind: Kind, count: int, memory_bytes: int | None) -> Accelerators:
    """As if a machine had `count` devices: for planning elsewhere."""
    return Accelerators(kind, count, tuple(map(str, range(count))), memory_bytes, None)


def count_nodes(kind: Kind, root: Path = Path("/")) -> int:
    """The devices of `kind` that have a file in /dev. A container may have device 3 alone, which
    is the only one there and so number 0: the numbers of the files say nothing.
    """
    try:
        names = [entry.name for entry in (root / "dev").iterdir()]
    except OSError:
        return 0
    return sum(NODES[kind].fullmatch(name) is not None for name in names)


def assign(
    kinds: Sequence[Kind], accelerators: Mapping[Kind, Accelerators]
) -> tuple[Slot | None, ...]:
    """A device for each rank, in order; None for a rank on "cpu". No device is given twice.

    Raises UsageError with wanted and visible counts of every kind that there is too little of.
    """
    wanted = {kind: kinds.count(kind) for kind in MASKS}
    problems = [
        _too_few(kind, count, accelerators.get(kind) or assumed(kind, 0, None))
        for kind, count in wanted.items()
        if count > (len(accelerators[kind].visible) if kind in accelerators else 0)
    ]
    if problems:
        raise UsageError("\n".join(problems))
    given = dict.fromkeys(MASKS, 0)
    slots: list[Slot | None] = []
    for kind in kinds:
        if kind == "cpu":
            slots.append(None)
            continue
        index = given[kind]
        given[kind] += 1
        slots.append(Slot(kind, index, accelerators[kind].visible[index]))
    return tuple(slots)


def mask_environment(slot: Slot | None) -> dict[str, str]:
    """What to set in the rank's process before it imports anything that touches the device."""
    return {} if slot is None else {MASKS[slot.kind]: slot.visible}


def _too_few(kind: Kind, wanted: int, there: Accelerators) -> str:
    devices = f"{wanted} {kind} device" + ("s are" if wanted > 1 else " is")
    text = f"{devices} wanted, one a rank, and {len(there.visible)} visible"
    if there.mask is None:
        return (
            f"{text}; lower groups, tensor_parallel or ranks, or run where there are more "
            "(`asapctl doctor` shows what was found)"
        )
    return (
        f"{text} of {there.present} ({MASKS[kind]}={plain(there.mask)}); lower groups, "
        "tensor_parallel or ranks, or let the mask show more"
    )


def _cuda_mask(mask: str, present: int, names: Sequence[str]) -> tuple[str, ...]:
    """As the CUDA programming guide has it: indices or UUIDs, the list ending at -1. What the guide
    makes of other invalid entries (it drops the rest) is refused here.
    """
    entries = [entry.strip() for entry in mask.split(",")]
    for end in ("", "-1", "NoDevFiles"):
        if end in entries:
            del entries[entries.index(end) :]
    named = [entry for entry in entries if entry.startswith(_NAMED)]
    where = f"CUDA_VISIBLE_DEVICES={plain(mask)}"
    if named and len(named) < len(entries):
        raise UsageError(
            f"{where}: mixes numbers and UUIDs, so one device could be named twice; take one kind"
        )
    for place, entry in enumerate(entries):
        if not named and not _NUMBER.fullmatch(entry):
            raise UsageError(f'{where}: "{plain(entry)}" is neither a number nor a UUID')
        if any(_same(entry, other) for other in entries[:place]):
            raise UsageError(f"{where}: names {plain(entry)} twice; give each device once")
        if named:
            there = not names or entry.startswith("MIG-") or _is_one_of(entry, names)
        else:
            there = int(entry) < present
        if not there:
            raise UsageError(f"{where}: there is no device {plain(entry)}; {_there(present)}")
    return tuple(entries)


def _ascend_mask(mask: str, present: int) -> tuple[str, ...]:
    """As CANN's environment variable reference has it: numbers that ascend, commas between them and
    nothing else. CANN reads no further than what it does not understand, which is refused here.
    """
    if mask in ("", "-1"):
        return ()
    entries = mask.split(",")
    where = f"ASCEND_RT_VISIBLE_DEVICES={plain(mask)}"
    for entry in entries:
        if not _NUMBER.fullmatch(entry):
            raise UsageError(
                f'{where}: "{plain(entry)}" is no device number; CANN takes numbers with commas '
                "between them, without spaces, and drops everything from there on"
            )
    numbers = [int(entry) for entry in entries]
    if numbers != sorted(set(numbers)):
        ordered = ",".join(map(str, sorted(set(numbers))))
        raise UsageError(f"{where}: the numbers must ascend, each once; write {ordered}")
    if numbers[-1] >= present:
        raise UsageError(f"{where}: there is no device {numbers[-1]}; {_there(present)}")
    return tuple(map(str, numbers))


def _there(present: int) -> str:
    if present == 0:
        return "no device was found here"
    return "there is only device 0" if present == 1 else f"there are 0 to {present - 1}"


def _same(one: str, other: str) -> bool:
    """Whether two entries of a mask may be one device: a UUID may be cut short."""
    if _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other):
        return int(one) == int(other)
    return one.startswith(other) or other.startswith(one)


def _is_one_of(entry: str, names: Sequence[str]) -> bool:
    return any(name.startswith(entry) for name in names)


def _least_memory(
    kind: Kind,
    visible: Sequence[str],
    tool: Sequence[tuple[str, int]],
    environ: Mapping[str, str],
) -> int | None:
    """Of the visible devices where their names say which they are; otherwise of all."""
    sizes = [size for _, size in tool]
    if any(entry.startswith("MIG-") for entry in visible):
        return None  # a part of a device, and nvidia-smi was asked for whole ones
    if any(entry.startswith("GPU-") for entry in visible):
        sizes = [size for name, size in tool if any(name.startswith(own) for own in visible)]
    elif kind == "npu" or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        sizes = [sizes[int(entry)] for entry in visible if int(entry) < len(sizes)]
    return min(sizes, default=None)


def _ask_nvidia_smi(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """UUID and bytes of each GPU, in PCI order; empty where there is no such tool."""
    text = run_tool(
        environ, "nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"
    )
    rows = re.findall(r"^(GPU-\S+), *(\d+)\s*$", text, re.MULTILINE)
    return [(name, int(size) * _MIB) for name, size in rows]


def _ask_npu_smi(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Bus address and bytes of each NPU, in order. A chip's second row in npu-smi's table has its
    bus address, and ends in used / total MB of the memory that models are in.
    """
    found = []
    for line in run_tool(environ, "npu-smi", "info").splitlines():
        bus = re.search(r"\b[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d\b", line)
        pairs = re.findall(r"\d+\s*/\s*(\d+)", line)
        if bus and pairs:
            found.append((bus.group(), int(pairs[-1]) * _MIB))
    return found


def run_tool(environ: Mapping[str, str], name: str, *arguments: str) -> str:
    """What a program on the PATH prints; empty where there is none, or it fails or hangs."""
    program = shutil.which(name, path=environ.get("PATH", os.defpath))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
            env=dict(environ),
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
