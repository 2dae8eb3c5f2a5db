"""What `asapctl status` shows: a snapshot as lines of text for a terminal of any size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rich.text import Text

from asapctl.keys import Key
from asapctl.prefill_view import duration
from asapctl.status_rows import SORTS, columns, header, row, sorted_ranks
from asapctl.units import count, seconds
from engine.control.messages import Snapshot
from engine.launch.registry import InstanceRecord
from engine.topology.ranks import Role

Health: TypeAlias = Literal["healthy", "starting", "stopping", "degraded", "stalled", "silent"]

HEALTH_STYLES: dict[Health, str] = {
    "healthy": "bold green",
    "starting": "bold cyan",
    "stopping": "bold cyan",
    "degraded": "bold yellow",
    "stalled": "bold red",
    "silent": "bold red",
}
_LABEL = 15
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"
_ROLES: tuple[Role, Role] = ("attention", "expert")


def health_of(snapshot: Snapshot) -> Health:
    """healthy, starting and stopping are as they should be; the others are not."""
    states = {rank.state for rank in snapshot.ranks}
    if "stalled" in states:
        return "stalled"
    if snapshot.problems or "dead" in states:
        return "degraded"
    if snapshot.quitting:
        return "stopping"
    return "healthy" if snapshot.ready else "starting"


def is_good(health: Health) -> bool:
    return health in ("healthy", "starting", "stopping")


@dataclass
class StatusView:
    """How the user wants it shown. first: the row at the top, of those that scroll. hint: of more
    keys.
    """

    ascii_only: bool = False
    sort: str = "rank"
    first: int = 0
    hint: str = ""
    _page: int = 1
    _last: int = 0  # the greatest useful `first`
    _headings: tuple[int, int] = (0, 0)

    def press(self, key: Key) -> None:
        if key == "sort":
            names = list(SORTS)
            self.sort = names[(names.index(self.sort) + 1) % len(names)]
            return
        moves: dict[Key, int] = {
            "up": self.first - 1,
            "down": self.first + 1,
            "page up": self.first - self._page,
            "page down": self.first + self._page,
            "home": 0,
            "end": self._last,
        }
        self.first = max(0, min(moves.get(key, self.first), self._last))

    def lines(
        self,
        record: InstanceRecord,
        snapshot: Snapshot,
        width: int,
        height: int | None = None,
        silent_s: float = 0.0,
    ) -> list[Text]:
        """The picture, at most `height` lines of `width` characters; None shows every rank.

        silent_s: for how long the controller has not answered; 0 while it does.
        """
        head = self._head(record, snapshot, width, height, silent_s)
        ranks = self._ranks(snapshot, width)
        if height is None:
            body = self._spaced(ranks)
        else:
            keys = height >= 8
            room = height - len(head) - keys
            body = self._spaced(ranks) if len(ranks) + 2 <= room else self._window(ranks, room)
            body += [self._keys(len(ranks))] * keys
        lines = (head + body)[:height]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
            line.truncate(width, overflow="ellipsis")
        return lines

    def _head(
        self,
        record: InstanceRecord,
        snapshot: Snapshot,
        width: int,
        height: int | None,
        silent_s: float,
    ) -> list[Text]:
        problems = [Text(f"! {problem}", "bold red") for problem in snapshot.problems]
        if silent_s:
            problems.insert(0, Text(f"! no answer for {duration(silent_s)}", "bold red"))
        lines = [_title(record, snapshot, silent_s > 0), _requests(snapshot)]
        if height is None or height >= 8:
            lines += [_rates(snapshot), _latency(snapshot)]
        if height is None or height >= 16:
            lines += [self._history(snapshot, width, index) for index in range(3)]
        if height is not None and len(problems) > (room := max(1, height // 6)):
            more = len(problems) - room + 1
            problems = [*problems[: room - 1], Text(f"! {more} problems: see --once", "bold red")]
        paced = [] if snapshot.paced is None else [Text(snapshot.paced, "bold yellow")]
        return lines + paced + problems

    def _history(self, snapshot: Snapshot, width: int, index: int) -> Text:
        """One of three: throughput, attention's busy share, experts' busy share."""
        values = [
            (point.tokens_per_s, point.attention_busy, point.expert_busy)[index]
            for point in snapshot.history
        ]
        highest = max(values, default=0.0) if index == 0 else 1.0
        label = ("tokens/s", "attention busy", "expert busy")[index]
        latest = values[-1] if values else 0.0
        now = count(latest) if index == 0 else f"{latest:.0%}"
        room = max(0, min(60, width - _LABEL - 20))
        style = ("blue", "green", "magenta")[index]
        line = sparkline(values[-room:] if room else [], highest, self.ascii_only)
        most = f" (of {count(highest)})" if index == 0 and highest else ""
        return Text.assemble((label.ljust(_LABEL), "dim"), (line, style), f" {now}{most}")

    def _ranks(self, snapshot: Snapshot, width: int) -> list[Text]:
        """A heading and a line a rank, for each role."""
        lines: list[Text] = []
        headings = []
        for role in _ROLES:
            chosen = columns(role, width, self.ascii_only)
            headings.append(len(lines))
            lines.append(header(chosen, width))
            ranks = sorted_ranks(snapshot.ranks, role, self.sort)
            lines += [row(rank, chosen, width) for rank in ranks]
        self._headings = (headings[0], headings[1])
        return lines

    def _spaced(self, ranks: list[Text]) -> list[Text]:
        """All of them, with an empty line above each heading."""
        self._last = self.first = 0
        attention, expert = self._headings
        return [Text(), *ranks[attention:expert], Text(), *ranks[expert:]]

    def _window(self, ranks: list[Text], room: int) -> list[Text]:
        """The lines that are scrolled to, below the heading that they belong to."""
        self._page = max(1, room - 2)
        if room < 1:
            self._last = 0
            return []
        self._last = max(0, len(ranks) - max(room, 2))
        self.first = min(self.first, self._last)
        shown = ranks[self.first : self.first + room]
        heading = max(index for index in self._headings if index <= self.first)
        # With one line there is no room for a heading at all.
        return shown if room == 1 else [ranks[heading], *shown[1:]]

    def _keys(self, total: int) -> Text:
        where = f"  ({self.first + 1} of {total})" if self._last else ""
        return Text(
            f"q quits  s sorts (by {self.sort})  arrows scroll{self.hint}{where}", style="dim"
        )


def sparkline(values: Sequence[float], highest: float, ascii_only: bool = False) -> str:
    """One character a value, the tallest for `highest`; the lowest for 0 alone."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    top = len(blocks) - 1
    if highest <= 0:
        return blocks[0] * len(values)
    return "".join(
        blocks[max(value > 0, min(top, round(value / highest * top)))] for value in values
    )


def _title(record: InstanceRecord, snapshot: Snapshot, silent: bool) -> Text:
    health: Health = "silent" if silent else health_of(snapshot)
    return Text.assemble(
        (record.name, "bold"),
        "  ",
        (health, HEALTH_STYLES[health]),
        f"  up {duration(snapshot.uptime_s)}",
        (f"  {record.url or record.command}  {Path(record.model).name}", "dim"),
    )


def _requests(snapshot: Snapshot) -> Text:
    failed = (f"{snapshot.failed:,} failed", "bold red" if snapshot.failed else "")
    return Text.assemble(
        f"{snapshot.running:,} running  {snapshot.waiting:,} waiting  {snapshot.finished:,} done  ",
        failed,
    )


def _rates(snapshot: Snapshot) -> Text:
    text = f"{count(snapshot.tokens_per_s)} prompt tokens/s  goodput {snapshot.goodput:.2f}/s"
    if snapshot.ttft_slo_s is not None:
        text += f" (TTFT within {seconds(snapshot.ttft_slo_s)})"
    return Text(text)


def _latency(snapshot: Snapshot) -> Text:
    ttft = snapshot.ttft
    if not ttft.count:
        return Text("TTFT of the last minute: none yet", style="dim")
    return Text(
        f"TTFT p50 {seconds(ttft.p50)}  p90 {seconds(ttft.p90)}  p99 {seconds(ttft.p99)}  "
        f"({ttft.count:,} in the last minute)"
    )
