"""Asking an instance for a trace, and writing it."""

import os
import sys
from pathlib import Path

import msgspec

from asapctl.status_live import ANSWER_S, attach, silence
from engine.control.messages import TraceReport
from engine.control.perfetto import to_perfetto
from engine.errors import RunError, UsageError
from engine.launch.registry import InstanceRecord

_GRACE_S = 12.0  # a rank may be in a long step at the end; the controller waits 10 s for it


def record_trace(record: InstanceRecord, seconds: float, output: str) -> str:
    """Writes the trace to `output`; returns what to tell the user.

    Raises UsageError when it could not be written, before anything is recorded, and RunError.
    """
    path = None if output == "-" else Path(output)
    if path is not None:
        _check(path)
    with attach(record) as client:
        snapshot = client.fresh_snapshot(ANSWER_S)
        report = None if snapshot is None else client.trace(seconds, _GRACE_S)
    if snapshot is None or report is None:
        raise silence(record)
    data = msgspec.json.encode(to_perfetto(report))
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
    missing = {str(rank.id) for rank in snapshot.ranks} - {str(rank.id) for rank in report.ranks}
    return _summary(report, sorted(missing), output)


def _check(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file for the trace")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.absolute().parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{path}: permission denied")


def _summary(report: TraceReport, missing: list[str], output: str) -> str:
    spans = sum(len(rank.spans) for rank in report.ranks)
    dropped = sum(rank.dropped for rank in report.ranks)
    lines = []
    if output != "-":
        lines.append(f"{output}: {spans:,} spans of {len(report.ranks)} ranks")
    if missing:
        lines.append(f"without {', '.join(missing)}: no answer came in time")
    if dropped:
        lines.append(f"{dropped:,} spans more were too many to keep; record for a shorter time")
    if not spans:
        lines.append("nothing ran meanwhile")
    return "\n".join(lines)
