"""What a prefill run shows: progress on a terminal, notes and the summary on standard error."""

import os
import stat
import sys
import time
from pathlib import Path

import msgspec
from rich.text import Text

from asapctl.live_lines import LiveLines
from engine.control.messages import Snapshot
from engine.files import exists, is_file
from engine.offline.paths import STANDARD, named_output
from engine.offline.stats import Summary, Tally, plural

_REDRAW_S = 0.2
_MESSAGE = 300


class PrefillView(LiveLines):
    """Shows a run on standard error; nothing but notes and the summary without a terminal."""

    def __init__(self, live: bool = True) -> None:
        """live: whether progress may be drawn (see `may_draw`)."""
        super().__init__(_REDRAW_S, live)

    def loading(self, snapshot: Snapshot) -> None:
        ready = sum(rank.ready for rank in snapshot.ranks)
        self.draw(f"loading: {ready} of {len(snapshot.ranks)} ranks ready")

    def progress(self, tally: Tally, size: int | None, snapshot: Snapshot | None) -> None:
        self.draw(progress_text(tally, size, snapshot, time.monotonic()))

    def print_summary(self, summary: Summary) -> None:
        self._console.print(Text(summary_text(summary)))


def may_draw(source: str, output: str | None) -> bool:
    """Whether progress on a terminal disturbs nothing else that may be on it.

    It does when results go to the terminal, directly or through a pipe, and while prompts are
    typed. source, output: as the command has them.
    """
    if source == STANDARD and os.isatty(0):
        return False
    path = named_output(Path(source) if is_file(Path(source)) else None, output)
    if path is not None:
        return is_file(path) or not exists(path)
    try:
        return stat.S_ISREG(os.fstat(1).st_mode)
    except OSError:
        return False


def progress_text(tally: Tally, size: int | None, snapshot: Snapshot | None, now: float) -> str:
    """Two lines: how far the run is, and what share of the time each rank computed.

    The number of prompts is not known before the input's end, so the time left is judged by bytes:
    those of the lines that this run has finished, against those that are left.
    """
    parts = ["paced"] if snapshot is not None and snapshot.paced is not None else []
    parts.append(plural(tally.ok + tally.failed + tally.skipped, "prompt"))
    if tally.failed:
        parts.append(f"{tally.failed} failed")
    if tally.first_admission is not None and now > tally.first_admission:
        elapsed = now - tally.first_admission
        parts.append(f"{tally.prompt_tokens / elapsed:,.0f} tokens/s")
        if size and tally.bytes_done:
            done = min(tally.bytes_before + tally.bytes_done, size)
            parts.append(f"{done / size:.0%}")
            parts.append(f"{duration(elapsed * (size - done) / tally.bytes_done)} left")
    text = " | ".join(parts)
    if snapshot is not None and snapshot.ranks:
        text += "\n" + "  ".join(
            f"{rank.id} {rank.busy:.0%}" for rank in sorted(snapshot.ranks, key=lambda r: r.id)
        )
    return text


def summary_text(summary: Summary) -> str:
    if summary.skipped == summary.prompts:
        were = "was" if summary.skipped == 1 else "were"
        return (
            f"nothing to do: {plural(summary.skipped, 'prompt')} {were} done before -> "
            f"{summary.output}"
        )
    counts = f"{summary.ok} ok, {summary.failed} failed"
    if summary.skipped:
        counts += f", {summary.skipped} done before"
    lines = [] if summary.paced is None else [summary.paced]
    lines += [f"{plural(summary.prompts, 'prompt')}: {counts} -> {summary.output}"]
    if summary.ok:
        lines.append(
            f"{plural(summary.prompt_tokens, 'token')} in {summary.seconds:.2f} s "
            f"({summary.tokens_per_s:,.0f} tokens/s), after {summary.load_seconds:.1f} s of loading"
        )
        lines.append(
            f"busy: attention {summary.attention_busy:.0%}, experts {summary.expert_busy:.0%}; "
            f"time per prompt: mean {summary.prompt_seconds.mean:.3f} s, "
            f"p99 {summary.prompt_seconds.p99:.3f} s"
        )
    restarted = [rank for rank in summary.ranks if rank.restarts]
    if restarted:
        listed = ", ".join(f"{rank.rank} ({_times(rank.restarts)})" for rank in restarted)
        lines.append(f"ranks that ended and were started again: {listed}")
    if summary.failed:
        codes = ", ".join(f"{count} {code}" for code, count in summary.failures.items())
        lines.append(f"failed: {codes}; the first is {_brief(summary.first_failure or '')}")
        lines.append("the failed lines say why in their records; a rerun tries them again")
    return "\n".join(lines)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _brief(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 3]}..."


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def print_json(summary: Summary) -> None:
    """One line on standard output."""
    sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
