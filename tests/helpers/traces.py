"""What a trace file must hold to, to be read by Perfetto and to make sense."""

from collections import defaultdict
from typing import Any

import msgspec


def check_trace(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What every trace file must hold to; its events by phase."""
    trace = msgspec.json.decode(msgspec.json.encode(trace))
    phases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        phases[event["ph"]].append(event)
        assert event["ph"] == "M" or event["ts"] >= 0
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in phases["X"]:
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():  # nest, or do not overlap
        open_ends: list[float] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = round(event["ts"] + event["dur"], 3)
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    named = {e["pid"] for e in phases["M"] if e["name"] == "process_name"}
    assert {pid for pid, _ in tracks} <= named
    assert len(named) == sum(e["name"] == "process_name" for e in phases["M"])
    starts = {e["id"]: e for e in phases["s"]}
    ends = {e["id"]: e for e in phases["f"]}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(phases["s"])
    assert len(ends) == len(phases["f"])
    assert {e["id"] for e in phases["t"]} <= starts.keys()
    for arrow in [*phases["s"], *phases["t"], *phases["f"]]:
        slices = tracks[arrow["pid"], arrow["tid"]]
        assert any(e["ts"] <= arrow["ts"] <= round(e["ts"] + e["dur"], 3) for e in slices)
        assert starts[arrow["id"]]["ts"] <= arrow["ts"] <= ends[arrow["id"]]["ts"]
    return phases
