"""What `asapctl status` shows where there are several instances: a line each, then one's ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from rich.text import Text

from asapctl.keys import Key
from asapctl.prefill_view import duration
from asapctl.status_view import HEALTH_STYLES, Health, StatusView, health_of, is_good
from asapctl.units import count, seconds
from engine.control.messages import Snapshot
from engine.launch.registry import InstanceRecord

_NOTHING = Snapshot(False, 0, 0, 0, 0, [])
_TITLES = ("", "state", "running", "waiting", "done", "tokens/s", "TTFT p50", "work left")
_WIDTHS = (4, 9, 8, 8, 9, 9, 9, 10)
_LOW = 12  # a terminal with fewer lines shows the chosen instance alone


class Shown(msgspec.Struct, frozen=True):
    """An instance: the last that was heard of it, and for how long it has not answered."""

    snapshot: Snapshot | None
    silent_s: float = 0.0

    @property
    def health(self) -> Health:
        if self.silent_s:
            return "silent"
        return "starting" if self.snapshot is None else health_of(self.snapshot)


def fleet_health(healths: Sequence[Health]) -> Health:
    """Of all together: what all are, or degraded when any is not as it should be."""
    if len(set(healths)) == 1:
        return healths[0]
    if not all(map(is_good, healths)):
        return "degraded"
    return "stopping" if "stopping" in healths else "starting"


@dataclass
class FleetView:
    """How the user wants it shown. chosen: the instance whose ranks are shown."""

    ascii_only: bool = False
    chosen: int = 0
    _count: int = 1
    _one: StatusView = field(default_factory=StatusView)

    def __post_init__(self) -> None:
        self._one = StatusView(self.ascii_only, hint="  tab, 0-9 chooses")

    def press(self, key: Key) -> None:
        before = self.chosen
        if key == "tab":
            self.chosen = (self.chosen + 1) % self._count
        elif key == "back tab":
            self.chosen = (self.chosen - 1) % self._count
        elif key.isdigit():
            self.chosen = int(key) if int(key) < self._count else self.chosen
        else:
            self._one.press(key)
        if self.chosen != before:
            self._one.first = 0

    def lines(
        self,
        record: InstanceRecord,
        shown: Sequence[Shown],
        width: int,
        height: int | None = None,
    ) -> list[Text]:
        """The picture, at most `height` lines of `width` characters; None shows everything."""
        self._count = len(shown)
        head: list[Text] = []
        if height is None:
            head = [*_summary(record, shown), _header(), *self._rows(shown, len(shown), mark=False)]
            for index in range(len(shown)):
                head += [Text(), *self._detail(record, shown, index, width, None)]
        elif height >= _LOW:
            room = max(1, min(len(shown), height // 3 - 2))
            head = [*_summary(record, shown), _header(), *self._rows(shown, room)]
        for line in head:
            line.no_wrap, line.overflow = True, "ellipsis"
            line.truncate(width, overflow="ellipsis")
        if height is None:
            return head
        return head + self._detail(record, shown, self.chosen, width, height - len(head))

    def _rows(self, shown: Sequence[Shown], room: int, mark: bool = True) -> list[Text]:
        """Those around the chosen one."""
        first = max(0, min(self.chosen - room // 2, len(shown) - room))
        return [
            _row(index, shown[index], mark and index == self.chosen)
            for index in range(first, first + room)
        ]

    def _detail(
        self,
        record: InstanceRecord,
        shown: Sequence[Shown],
        index: int,
        width: int,
        height: int | None,
    ) -> list[Text]:
        one = shown[index]
        named = msgspec.structs.replace(record, name=f"{record.name} {index}")
        return self._one.lines(named, one.snapshot or _NOTHING, width, height, one.silent_s)


def _summary(record: InstanceRecord, shown: Sequence[Shown]) -> list[Text]:
    health = fleet_health([one.health for one in shown])
    there = [one.snapshot for one in shown if one.snapshot is not None and not one.silent_s]
    up = max((snapshot.uptime_s for snapshot in there), default=0.0)
    failed = sum(snapshot.failed for snapshot in there)
    title = Text.assemble(
        (record.name, "bold"),
        "  ",
        (health, HEALTH_STYLES[health]),
        ("" if record.paced is None else "  paced", "bold yellow"),
        f"  {len(shown)} instances  up {duration(up)}",
        (f"  {record.url or record.command}", "dim"),
    )
    rates = sum(snapshot.tokens_per_s for snapshot in there)
    totals = Text.assemble(
        f"{sum(s.running for s in there):,} running  {sum(s.waiting for s in there):,} waiting  "
        f"{sum(s.finished for s in there):,} done  ",
        (f"{failed:,} failed", "bold red" if failed else ""),
        f"  {count(rates)} prompt tokens/s",
    )
    return [title, totals]


def _header() -> Text:
    return Text(_cells(_TITLES), style="bold")


def _row(index: int, one: Shown, chosen: bool) -> Text:
    health = one.health
    cells = ["", "", "", "", "", ""]
    if (snapshot := one.snapshot) is not None and not one.silent_s:
        ttft = seconds(snapshot.ttft.p50) if snapshot.ttft.count else "-"
        cells = [
            *(f"{snapshot.running:,}", f"{snapshot.waiting:,}", count(snapshot.finished)),
            *(count(snapshot.tokens_per_s), ttft, count(snapshot.work)),
        ]
    text = Text(_cells([f"{'>' if chosen else ' '} {index}", health, *cells]).rstrip())
    start = _WIDTHS[0] + 1
    text.stylize(HEALTH_STYLES[health], start, start + len(health))
    return text


def _cells(cells: Sequence[str]) -> str:
    """The first two to the left, numbers to the right."""
    return " ".join(
        cell.ljust(width) if place < 2 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
