"""Accelerators, whether they may be opened, and the masks and settings that rule them."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.doctor.facts import Fact, Section, in_units, section
from engine.echo import plain
from engine.errors import UsageError
from engine.launch.accelerators import MASKS, NODES, Accelerators, Kind, read_accelerators

NAMES: dict[Kind, str] = {"cuda": "NVIDIA GPUs", "npu": "Ascend NPUs"}
# Without these files no device of the kind works: NVIDIA's and Ascend's container documentation.
_CONTROL: dict[Kind, tuple[str, ...]] = {
    "cuda": ("nvidiactl", "nvidia-uvm"),
    "npu": ("davinci_manager", "devmm_svm", "hisi_hdc"),
}
_SETTINGS = re.compile("(HCCL|NCCL|GLOO)_[A-Z0-9_]+")


def read_devices(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Section:
    return section(
        "devices",
        [
            *((NAMES[kind], lambda kind=kind: _devices(kind, environ, root)) for kind in MASKS),
            ("environment", lambda: _settings(environ)),
        ],
    )


def _devices(kind: Kind, environ: Mapping[str, str], root: Path) -> Iterator[Fact]:
    name = NAMES[kind]
    try:
        there = read_accelerators(kind, environ, root)
    except UsageError as error:
        what, _, remedy = str(error).rpartition("; ")
        yield Fact(name, "problem", what, remedy=f"correct {MASKS[kind]}: {remedy}")
        return
    value = {
        "present": there.present,
        "visible": list(there.visible),
        "memory_bytes": there.memory_bytes,
        "mask": there.mask,
    }
    closed = _closed(kind, root) if there.present else []
    if closed:
        yield Fact(
            name,
            "problem",
            f"{there.present}, but this user cannot open {', '.join(closed)}",
            value,
            "give the container these files, or this user the right to them (for Ascend, the "
            "group HwHiAiUser)",
        )
    else:
        yield Fact(name, "ok" if there.visible else "absent", _describe(there), value)


def _describe(there: Accelerators) -> str:
    if not there.present:
        return "none"
    text = str(there.present)
    if there.memory_bytes is not None:
        text += f", the smallest with {in_units(there.memory_bytes)}"
    else:
        text += ", memory not known"
    if there.mask is not None:
        seen = ", ".join(there.visible) or "none"
        text += f"; visible: {seen} ({MASKS[there.kind]}={plain(there.mask)})"
    return text


def _closed(kind: Kind, root: Path) -> list[str]:
    """Files in /dev that the devices need and this user cannot open, or that are not there."""
    folder = root / "dev"
    names = [entry.name for entry in folder.iterdir() if NODES[kind].fullmatch(entry.name)]
    wanted = (*_CONTROL[kind], *sorted(names))
    return [f"/dev/{name}" for name in wanted if not os.access(folder / name, os.R_OK | os.W_OK)]


def _settings(environ: Mapping[str, str]) -> Iterator[Fact]:
    for name in sorted(environ):
        if _SETTINGS.fullmatch(name):
            yield Fact(name, "ok", plain(environ[name]), environ[name])
