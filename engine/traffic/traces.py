"""Traces of requests: Mooncake's JSONL, Azure's CSV and BurstGPT's, told apart by how they begin.

Mooncake: `timestamp` (ms), `input_length`. Azure 2023 and 2024: `TIMESTAMP` (date and time, UTC
where no zone is given), `ContextTokens`. BurstGPT: `Timestamp` (s), `Request tokens`. Everything
else in a line is passed over.
"""

import csv
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from engine.echo import plain, shown
from engine.errors import UsageError
from engine.offline.lines import Line, LineReader
from engine.offline.paths import check_start
from engine.traffic.arrivals import Arrival
from engine.traffic.lengths import MOST_TOKENS, TRACES

MOST_REQUESTS = 5_000_000
_MOST_LINE_BYTES = 16 << 20  # the hashes of Mooncake's longest prompts
_MOST_PROBLEMS = 5
_WAIT_S = 1.0
_AZURE_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII
)
_WHOLE = re.compile(r"[+-]?\d{1,4000}", re.ASCII)

# Of a line's text: the time in seconds, and the tokens. Raises ValueError, which says why not.
_Row: TypeAlias = Callable[[str], tuple[float, int]]


class _Format(NamedTuple):
    row: _Row
    has_header: bool


def read_trace(path: Path) -> list[Arrival]:
    """All requests by time, the first at 0; those of one moment in the order of the file. Raises
    UsageError, which names the lines.
    """
    found = _read(path, _trace_format, TRACES)
    start = min(at for at, _ in found)
    arrivals = [Arrival(at - start, tokens) for at, tokens in found]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def read_lengths(path: Path, forms: str) -> list[int]:
    """Of a trace, or one length a line. Raises UsageError, which names the lines, and `forms`: what
    the user may give.
    """
    return [tokens for _, tokens in _read(path, _lengths_format, forms)]


def _read(
    path: Path, choose: Callable[[str], _Format | None], forms: str
) -> list[tuple[float, int]]:
    rows: list[tuple[float, int]] = []
    problems: list[str] = []
    format_: _Format | None = None
    for line in _lines(path, forms):
        try:
            text = _text(line)
            if format_ is None:
                format_ = choose(text)
                if format_ is None:
                    raise ValueError(f"{plain(text)} begins none of the known formats")
                if format_.has_header:
                    continue
            rows.append(format_.row(text))
        except ValueError as error:
            problems.append(f"{path}: line {line.number}: {error}")
            if format_ is None:  # what follows would be as strange
                raise UsageError(f"{problems[0]}; give {forms}") from None
            if len(problems) == _MOST_PROBLEMS:
                break
        if len(rows) > MOST_REQUESTS:
            raise UsageError(f"{path}: more than {MOST_REQUESTS:,} requests; give a part of it")
    if problems:
        more = ", and perhaps more behind them" if len(problems) == _MOST_PROBLEMS else ""
        remedy = f"{path}: correct these lines{more}, or take them out; or give {forms}"
        raise UsageError("\n".join([*problems, remedy]))
    if not rows:
        raise UsageError(f"{path}: there is no request in it; give {forms}")
    return rows


def _lines(path: Path, forms: str) -> Iterator[Line]:
    try:
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            what = "a folder" if stat.S_ISDIR(kind) else "neither a file nor a pipe"
            raise UsageError(f"{path} is {what}; give {forms}")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name of a file"
        raise UsageError(f"{path}: cannot be read: {reason}; give {forms}") from None
    try:
        reader = LineReader(
            fd, _MOST_LINE_BYTES, lambda data: check_start(data, str(path)), str(path)
        )
        while not reader.ended:
            line = reader.take()
            if line is not None:
                yield line
            else:
                reader.wait(_WAIT_S)
    finally:
        os.close(fd)


def _text(line: Line) -> str:
    if line.data is None:
        raise ValueError(f"longer than {_MOST_LINE_BYTES >> 20} MiB")
    try:
        text = line.data.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text; save it as UTF-8") from None
    if "\r" in text:
        raise ValueError("a carriage return alone ends no line; save it with line feeds")
    return text


def _trace_format(first: str) -> _Format | None:
    if first.startswith("{"):
        return _Format(_mooncake, False)
    names = [name.strip() for name in _fields(first)]
    for time, tokens, seconds in (
        ("TIMESTAMP", "ContextTokens", _azure_seconds),
        ("Timestamp", "Request tokens", _seconds),
    ):
        if time in names and tokens in names:
            return _Format(_Columns(names, time, tokens, seconds), True)
    return None


def _lengths_format(first: str) -> _Format | None:
    if _WHOLE.fullmatch(first):
        return _Format(lambda text: (0.0, _length(text, "the length")), False)
    return _trace_format(first)


class _Columns:
    """Reads two columns of a CSV, wherever they are."""

    def __init__(
        self, names: list[str], time: str, tokens: str, seconds: Callable[[str, str], float]
    ) -> None:
        self._names = names
        self._time = time
        self._tokens = tokens
        self._seconds = seconds

    def __call__(self, text: str) -> tuple[float, int]:
        fields = _fields(text)
        if len(fields) != len(self._names):
            raise ValueError(f"{len(fields)} columns, where the first line has {len(self._names)}")
        row = dict(zip(self._names, fields, strict=True))
        at = self._seconds(row[self._time].strip(), self._time)
        return at, _length(row[self._tokens].strip(), self._tokens)


def _mooncake(text: str) -> tuple[float, int]:
    try:
        record: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {plain(str(error))}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {shown(record)}")
    for key in ("timestamp", "input_length"):
        if key not in record:
            raise ValueError(f"{key} is missing")
    at, tokens = record["timestamp"], record["input_length"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not _is_time(at):
        raise ValueError(f"timestamp: expected milliseconds, got {shown(at)}")
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise ValueError(f"input_length: expected a whole number, got {shown(tokens)}")
    return at / 1000, _checked(tokens, "input_length")


def _azure_seconds(text: str, name: str) -> float:
    match = _AZURE_TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        date, time, fraction, sign, hours, minutes = match.groups()
        at = datetime.fromisoformat(f"{date} {time}").replace(tzinfo=timezone.utc)
        offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)).total_seconds()
    except ValueError:
        raise ValueError(
            f"{name}: expected a time like 2023-11-16 18:15:46.6805900, got {plain(text)}"
        ) from None
    # By hand: a datetime of Python 3.10 reads three digits of it or six.
    return at.timestamp() + float(fraction or 0) - (-offset if sign == "-" else offset)


def _seconds(text: str, name: str) -> float:
    try:
        at = float(text)
    except ValueError:
        at = math.nan
    if not _is_time(at):
        raise ValueError(f"{name}: expected seconds, got {plain(text)}")
    return at


def _is_time(at: float) -> bool:
    return 0 <= at < 1e15


def _length(text: str, name: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{name}: expected a whole number, got {plain(text)}")
    return _checked(int(text), name)


def _checked(tokens: int, name: str) -> int:
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{name}: {shown(tokens)} is not from 1 to {MOST_TOKENS:,} tokens")
    return tokens


def _fields(text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from None
