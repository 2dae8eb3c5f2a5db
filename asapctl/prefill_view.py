"""What a prefill run shows: progress on a terminal, notes and the summary on standard error."""

import os
import sys
import time
from types import TracebackType

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from engine.control.messages import Snapshot
from engine.errors import RunError
from engine.offline.stats import Summary, Tally

_REDRAW_S = 0.2


class PrefillView:
    """Shows a run on standard error; nothing but notes and the summary without a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._next_draw = 0.0

    def __enter__(self) -> "PrefillView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def loading(self, snapshot: Snapshot) -> None:
        ready = sum(rank.ready for rank in snapshot.ranks)
        self._draw(f"loading: {ready} of {len(snapshot.ranks)} ranks ready")

    def progress(
        self, tally: Tally, bytes_read: int, size: int | None, snapshot: Snapshot | None
    ) -> None:
        self._draw(progress_text(tally, bytes_read, size, snapshot, time.monotonic()))

    def print_summary(self, summary: Summary) -> None:
        self._console.print(Text(summary_text(summary)))

    def _draw(self, text: str) -> None:
        now = time.monotonic()
        if self._live is None or now < self._next_draw:
            return
        self._next_draw = now + _REDRAW_S
        self._live.update(Text(text, overflow="ellipsis"), refresh=True)


def progress_text(
    tally: Tally, bytes_read: int, size: int | None, snapshot: Snapshot | None, now: float
) -> str:
    """Two lines: how far the run is, and what share of the time each rank computed.

    The number of prompts is not known before the input's end, so the time left is judged by the
    share of its bytes that is behind us, less what is still in flight.
    """
    done = tally.ok + tally.failed + tally.skipped
    parts = [f"{done} prompts"]
    if tally.failed:
        parts.append(f"{tally.failed} failed")
    if tally.first_admission is not None and now > tally.first_admission:
        elapsed = now - tally.first_admission
        parts.append(f"{tally.prompt_tokens / elapsed:,.0f} tokens/s")
        if size and done and tally.prompts:
            share = min(bytes_read / size, 1.0) * done / tally.prompts
            parts.append(f"{share:.0%}")
            parts.append(f"{duration(elapsed * (1 - share) / share)} left")
    text = " | ".join(parts)
    if snapshot is not None and snapshot.ranks:
        text += "\n" + "  ".join(
            f"{rank.id} {rank.busy:.0%}" for rank in sorted(snapshot.ranks, key=lambda r: r.id)
        )
    return text


def summary_text(summary: Summary) -> str:
    counts = f"{summary.ok} ok, {summary.failed} failed"
    if summary.skipped:
        counts += f", {summary.skipped} done before"
    lines = [f"{summary.prompts} prompts: {counts} -> {summary.output}"]
    if summary.ok:
        lines.append(
            f"{summary.prompt_tokens:,} tokens in {summary.seconds:.2f} s "
            f"({summary.tokens_per_s:,.0f} tokens/s), after {summary.load_seconds:.1f} s of loading"
        )
        lines.append(
            f"busy: attention {summary.attention_busy:.0%}, experts {summary.expert_busy:.0%}; "
            f"time per prompt: mean {summary.prompt_seconds.mean:.3f} s, "
            f"p99 {summary.prompt_seconds.p99:.3f} s"
        )
    if summary.failed:
        lines.append("the failed lines say why in their records; a rerun tries them again")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def print_json(summary: Summary) -> None:
    """One line on standard output. Raises RunError when nobody reads it."""
    try:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RunError("standard output was closed before the summary was printed") from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RunError(f"standard output: cannot write the summary: {error.strerror}") from None
