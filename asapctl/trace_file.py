"""Asking an instance for a trace, and writing it."""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from asapctl.status_print import ANSWER_S, silence
from engine.control.client import Client
from engine.control.messages import Snapshot, TraceReport
from engine.control.perfetto import to_perfetto
from engine.errors import RunError, UsageError
from engine.launch.attached import attached, fresh_snapshots
from engine.launch.registry import InstanceRecord

_GRACE_S = 12.0  # a rank may be in a long step at the end; the controller waits 10 s for it


def record_trace(record: InstanceRecord, seconds: float, output: str) -> str:
    """Writes the trace to `output`; returns what to tell the user.

    Raises UsageError when it could not be written, before anything is recorded, and RunError.
    """
    path = None if output == "-" else Path(output)
    if path is not None:
        _check(path)
    with attached(record) as clients, ThreadPoolExecutor(len(clients)) as pool:
        snapshots = fresh_snapshots(clients, ANSWER_S)
        if not any(snapshots):
            raise silence(record)

        def ask(client: Client, snapshot: Snapshot | None) -> TraceReport | None:
            return None if snapshot is None else client.trace(seconds, _GRACE_S)

        answers = list(pool.map(ask, clients, snapshots))  # each in a thread of its own
    reports = [report for report in answers if report is not None]
    if not reports:
        raise silence(record)
    # Of an instance that is silent there is an empty report, so that the others keep their numbers.
    empty = TraceReport(reports[0].start, reports[0].end, [])
    data = msgspec.json.encode(to_perfetto(*(report or empty for report in answers)))
    try:
        if path is None:
            sys.stdout.buffer.write(data + b"\n")
            sys.stdout.buffer.flush()
        else:
            path.write_bytes(data)
    except OSError as error:
        if path is None:  # Python would complain once more when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RunError(f"{path or 'standard output'}: {error.strerror}") from None
    return _summary(reports, _missing(snapshots, answers), output)


def _missing(
    snapshots: Sequence[Snapshot | None], answers: Sequence[TraceReport | None]
) -> list[str]:
    """Whose spans are not there."""
    missing = []
    for number, (snapshot, report) in enumerate(zip(snapshots, answers, strict=True)):
        if snapshot is None or report is None:
            missing.append(f"instance {number}")
            continue
        there = {str(rank.id) for rank in report.ranks}
        prefix = f"instance {number} " if len(answers) > 1 else ""
        gone = sorted({str(rank.id) for rank in snapshot.ranks} - there)
        missing += [f"{prefix}{name}" for name in gone]
    return missing


def _check(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file for the trace")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.absolute().parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{path}: permission denied")


def _summary(reports: Sequence[TraceReport], missing: list[str], output: str) -> str:
    ranks = [rank for report in reports for rank in report.ranks]
    spans = sum(len(rank.spans) for rank in ranks)
    dropped = sum(rank.dropped for rank in ranks)
    lines = []
    if output != "-":
        lines.append(f"{output}: {spans:,} spans of {len(ranks)} ranks")
    if missing:
        lines.append(f"without {', '.join(missing)}: no answer came in time")
    if dropped:
        lines.append(f"{dropped:,} spans more were too many to keep; record for a shorter time")
    if not spans:
        lines.append("nothing ran meanwhile")
    return "\n".join(lines)
