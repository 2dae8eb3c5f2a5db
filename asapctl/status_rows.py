"""The rank tables of `asapctl status`: columns that give way when there is no room for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from asapctl.units import count, memory
from engine.control.messages import RankStatus
from engine.topology.ranks import Role

STATE_STYLES = {
    "starting": "cyan",
    "idle": "dim",
    "computing": "green",
    "waiting": "yellow",
    "stalled": "bold red",
    "dead": "bold red",
}
_URGENCY = ("dead", "stalled", "starting", "waiting", "computing", "idle")
_BAR = 8
_LEAST_FLEXIBLE = 10

SORTS: dict[str, Callable[[RankStatus], float]] = {
    "rank": lambda rank: 0,
    "busy": lambda rank: -rank.recent_busy,
    "wait": lambda rank: -rank.recent_waits,
    "tokens/s": lambda rank: -rank.tokens_per_s,
    "queue": lambda rank: -rank.queue,
    "memory": lambda rank: -rank.memory_bytes,
    "state": lambda rank: _URGENCY.index(rank.state),
}


def sorted_ranks(ranks: Sequence[RankStatus], role: Role, sort: str) -> list[RankStatus]:
    """The ranks of one role; those that are equal under `sort` stay in the order of ranks."""
    return sorted((r for r in ranks if r.id.role == role), key=lambda r: (SORTS[sort](r), r.id))


@dataclass(frozen=True)
class Column:
    """width 0: takes what is left. Those with the highest `gives_way` go first."""

    title: str
    width: int
    gives_way: int
    cell: Callable[[RankStatus], Text | str]
    right: bool = True


def columns(role: Role, width: int, ascii_only: bool) -> list[Column]:
    """Those that fit into `width`, in order."""
    chosen = _all_columns(role, ascii_only)
    while len(chosen) > 1 and _needed(chosen) > width:
        chosen.remove(max(chosen, key=lambda column: column.gives_way))
    return chosen


def header(chosen: Sequence[Column], width: int) -> Text:
    return Text.assemble(_line([c.title for c in chosen], chosen, width), style="bold")


def row(rank: RankStatus, chosen: Sequence[Column], width: int) -> Text:
    return _line([column.cell(rank) for column in chosen], chosen, width)


def bar(compute: float, wait: float, width: int, ascii_only: bool) -> Text:
    """Shares of time as `width` characters: computing, then waiting with work, then idle."""
    full = round(min(compute, 1.0) * width)
    half = min(round(min(compute + wait, 1.0) * width), width) - full
    marks = "#-." if ascii_only else "█▒·"
    return Text.assemble(
        (marks[0] * full, "green"),
        (marks[1] * half, "yellow"),
        (marks[2] * (width - full - half), "dim"),
    )


def _all_columns(role: Role, ascii_only: bool) -> list[Column]:
    def percent(share: float) -> str:
        return f"{share:.0%}"

    name = Column(role, 9, 0, _name, right=False)
    state = Column("state", 9, 2, lambda r: Text(r.state, STATE_STYLES[r.state]), right=False)
    busy = Column("busy", 4, 1, lambda r: percent(r.recent_busy))
    split = Column("", _BAR, 9, lambda r: bar(r.recent_busy, r.recent_waits, _BAR, ascii_only))
    size = Column("memory", 8, 6, lambda r: memory(r.memory_bytes))
    if role == "attention":
        wait = Column("wait", 4, 3, lambda r: percent(r.recent_waits))
        lanes = Column("lanes: batch, tokens, layer", 0, 4, _lanes, right=False)
        return [name, state, busy, wait, split, lanes, size]
    return [  # which never waits with work in its hands
        *(name, state, busy, split),
        Column("queue", 5, 4, lambda r: str(r.queue)),
        Column("tokens/s", 8, 5, lambda r: count(r.tokens_per_s)),
        Column("layers", 0, 8, _layers, right=False),
        Column("hottest", 10, 7, _hottest, right=False),
        size,
    ]


def _needed(chosen: Sequence[Column]) -> int:
    return sum(column.width or _LEAST_FLEXIBLE for column in chosen) + len(chosen) - 1


def _line(cells: Sequence[Text | str], chosen: Sequence[Column], width: int) -> Text:
    spare = width - sum(column.width for column in chosen) - len(chosen) + 1
    line = Text()
    for index, (cell, column) in enumerate(zip(cells, chosen, strict=True)):
        room = column.width or max(spare, 0)
        text = cell.copy() if isinstance(cell, Text) else Text(cell)
        text.truncate(room, overflow="ellipsis")
        text.align("right" if column.right else "left", room)
        line.append_text(Text(" ") if index else Text()).append_text(text)
    line.rstrip()
    return line


def _name(rank: RankStatus) -> Text:
    """Its number, and how often it was started again."""
    again = (f"  +{rank.deaths}", "bold yellow") if rank.deaths else ""
    return Text.assemble(str(rank.id.rank), again)


def _lanes(rank: RankStatus) -> str:
    lanes = sorted(rank.lanes, key=lambda lane: lane.lane)
    return "  ".join(f"#{lane.batch} {lane.tokens}t L{lane.layer}" for lane in lanes)


def _layers(rank: RankStatus) -> str:
    return ",".join(map(str, sorted(set(rank.serving))))


def _hottest(rank: RankStatus) -> str:
    hottest = rank.hottest
    return "" if hottest is None else f"#{hottest.expert} {hottest.imbalance:.1f}x"
