"""What a launched instance shows: how it loads, where it serves, and one line about how it is."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from asapctl import units
from asapctl.live_lines import LiveLines
from engine.control.messages import Snapshot
from engine.errors import RunError

if TYPE_CHECKING:
    from engine.launch.detach import Settle

_REDRAW_S = 0.5
_PLAIN_S = 60.0


class LaunchView(LiveLines):
    """Shows an instance on standard error; its URL alone goes to standard output.

    Without a terminal, a line is printed every minute in which something was done. settle: of a
    detached instance, whose output goes to its log once it is ready.
    """

    def __init__(self, settle: "Settle | None" = None) -> None:
        super().__init__(_REDRAW_S)
        self._settle = settle
        self._loaded: set[str] = set()
        self._last_line: tuple[int, int] = (0, 0)

    def loading(self, snapshots: Sequence[Snapshot]) -> None:
        for index, snapshot in enumerate(snapshots):
            for rank in snapshot.ranks:
                title = str(rank.id) if len(snapshots) == 1 else f"instance {index} {rank.id}"
                if rank.ready and title not in self._loaded:
                    self._loaded.add(title)
                    self.note(f"{title}: ready after {units.seconds(rank.load_seconds)}")
        count = sum(len(snapshot.ranks) for snapshot in snapshots)
        self.draw(f"loading: {len(self._loaded)} of {count} ranks ready")

    def ready(self, name: str, url: str, logs: Path) -> None:
        self._stop()
        try:
            typer.echo(f"{name} {url}")
        except RunError as error:  # no reason to end what serves
            self.note(f"{error}; {name} serves at {url}")
        self._settled(f"ready at {url}", logs)
        self._start()

    def joined(self, name: str, where: str, logs: Path) -> None:
        self._stop()
        self.note(f"{name}: taken in by {where}; logs of its ranks: {logs}")
        self._settled(f"taken in by {where}", logs)

    def _settled(self, text: str, logs: Path) -> None:
        """Whoever started it need not wait any more."""
        if self._settle is not None:
            self._settle(logs / "supervisor.log")
        self._begin()
        if self._settle is not None:
            self.note(f"{_now()} {text}")

    def alive(self, snapshot: Snapshot) -> None:
        if self._live is not None:
            self.draw(live_text(snapshot))
            return
        now, done = time.monotonic(), (snapshot.finished, snapshot.failed)
        if now >= self._next_draw:
            self._next_draw = now + _PLAIN_S
            if done != self._last_line or snapshot.problems:
                self._last_line = done
                self.note(f"{_now()} {live_text(snapshot)}")

    def failed(self, error: Exception) -> None:
        self._stop()
        if self._settle is not None:  # whatever is written later misses the logs that are kept
            self.note(f"{_now()} {error}")


def live_text(snapshot: Snapshot) -> str:
    """How an instance stands, in one line that says the most important first."""
    parts = []
    if snapshot.paced is not None:
        parts.append("paced")
    if snapshot.quitting:
        parts.append("stopping")
    parts += snapshot.problems
    parts.append(
        f"{snapshot.running} running, {snapshot.waiting} waiting, {snapshot.finished:,} done"
        + (f", {snapshot.failed:,} failed" if snapshot.failed else "")
    )
    if snapshot.tokens_per_s:
        parts.append(f"{snapshot.tokens_per_s:,.0f} tokens/s")
    if snapshot.ttft.count:
        p50, p99 = units.seconds(snapshot.ttft.p50), units.seconds(snapshot.ttft.p99)
        parts.append(f"TTFT p50 {p50}, p99 {p99}")
    return " | ".join(parts)


def _now() -> str:
    """As the other logs have it, so that `asapctl logs` puts it into its place."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"{stamp},{int(now % 1 * 1000):03}"
