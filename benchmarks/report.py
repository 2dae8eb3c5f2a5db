"""What every table of the benchmarks has in common: header, cells, medians, rounds in turn."""

import datetime
import importlib.metadata
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

_PACKAGES = ("asapctl", "torch", "transformers", "numpy", "pyzmq")
# What decides how fast a core multiplies matrices; machines of one name differ in it.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
_T = TypeVar("_T")


def header(title: str, packages: Sequence[str] = ()) -> str:
    """Markdown: what was measured, with which versions, on which machine, and when."""
    versions = [f"{name} {_version(name)}" for name in (*_PACKAGES, *packages)]
    now = datetime.datetime.now(datetime.timezone.utc)
    return "\n".join(
        (
            f"## {title}",
            "",
            f"- date: {now:%Y-%m-%d %H:%M} UTC; commit {_commit()}",
            f"- versions: Python {platform.python_version()}, {', '.join(versions)}",
            f"- machine: {_machine()}",
            "",
        )
    )


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """A markdown table; columns are named by the first row's keys. Absent cells are empty."""
    rows = list(rows)
    if not rows:
        return "(no rows)\n"
    names = list(rows[0])
    lines = [_line(names), _line("---" for _ in names)]
    lines += [_line(str(row.get(name, "")) for name in names) for row in rows]
    return "\n".join(lines) + "\n"


def median_range(values: Sequence[float], digits: int = 0) -> str:
    """For example `1,510 (1,480 to 1,563)`; `n/a` without values."""
    if not values:
        return "n/a"
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def ratio_range(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Of the ratios of each round, in which both were measured side by side."""
    return median_range([a / b for a, b in zip(ours, theirs, strict=True)], digits=2)


def alternate(measures: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Runs every measure once a round. Each round starts one further on, so that what a measure
    leaves behind (heat, caches) does not always meet the same one.
    """
    names = list(measures)
    found: dict[str, list[_T]] = {name: [] for name in names}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            found[name].append(measures[name]())
    return found


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _commit() -> str:
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    root = Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _machine() -> str:
    import psutil

    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    models = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    name = models[0] if models else platform.machine()
    cores = len(psutil.Process().cpu_affinity() or ())
    memory = psutil.virtual_memory().total / 2**30
    flags = next((line.split() for line in facts if line.startswith("flags")), [])
    widest = [flag for flag in _INSTRUCTIONS if flag in flags]
    return (
        f"{name} ({', '.join(widest) or platform.machine()}), {cores} cores usable, "
        f"{memory:.0f} GiB, Linux {platform.release()}"
    )
