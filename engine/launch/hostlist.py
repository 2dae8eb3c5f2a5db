"""Slurm's lists of hosts, as in `SLURM_JOB_NODELIST`: "login1,gpu[07-09,12],rack[0-1]n[1-4]"."""

import re
from collections.abc import Iterator
from itertools import product

from engine.echo import plain
from engine.errors import UsageError

# A host: characters of a name, and ranges of numbers in brackets.
_HOST = re.compile(r"(?:[\w.-]|\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def first_host(text: str, where: str) -> str:
    """The first host of a list, which Slurm numbers 0. Raises UsageError, which names `where`."""
    return next(expand(text, where))


def expand(text: str, where: str) -> Iterator[str]:
    """Every host of a list, in order: of several brackets the last one counts fastest. A number has
    as many digits as its range's first.

    Raises UsageError, which names `where`: no such list.
    """
    for host in re.split(r",(?![^\[]*\])", text.strip()):
        if not _HOST.fullmatch(host):
            raise UsageError(
                f"{where}={plain(text)}: not a list of hosts; give --rdzv-endpoint HOST:PORT"
            )
        parts = re.split(r"\[([^\]]*)\]", host)  # names and ranges take turns
        choices = [
            list(_numbers(part, text, where)) if place % 2 else [part]
            for place, part in enumerate(parts)
        ]
        yield from map("".join, product(*choices))


def _numbers(ranges: str, text: str, where: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first = match.group(1) if match else ""
        last = match.group(2) or first if match else ""
        if not match or not 0 <= int(last) - int(first) < 100_000:
            raise UsageError(
                f"{where}={plain(text)}: {plain(part) or 'nothing'} is no range of numbers; give "
                "--rdzv-endpoint HOST:PORT"
            )
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"
