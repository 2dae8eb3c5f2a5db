"""`asapctl status` once: a picture, or JSON."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from asapctl.status_fleet import FleetView, Shown, fleet_health
from asapctl.status_view import StatusView, health_of, is_good
from engine.control.messages import Snapshot
from engine.errors import RunError
from engine.launch.attached import attached, fresh_snapshots
from engine.launch.registry import InstanceRecord

ANSWER_S = 2.0  # a controller that takes longer is called silent
_SUMS = (
    *("running", "waiting", "finished", "failed"),
    *("prompt_tokens", "tokens_per_s", "goodput", "work"),
)


def snapshots_of(record: InstanceRecord) -> list[Snapshot | None]:
    """Of each instance. Raises RunError when no controller answers in time."""
    with attached(record) as clients:
        snapshots = fresh_snapshots(clients, ANSWER_S)
    if not any(snapshots):
        raise silence(record)
    return snapshots


def silence(record: InstanceRecord) -> RunError:
    """What to say of a controller that does not answer."""
    return RunError(
        f"instance {record.name}: its controller did not answer within {ANSWER_S:.0f} s; "
        f"its logs are in {record.logs}"
    )


def print_json(record: InstanceRecord) -> bool:
    """One object on standard output; returns whether the instance is as it should be."""
    snapshots = snapshots_of(record)
    _print(msgspec.json.encode(described(record, snapshots)).decode())
    return _all_good(snapshots)


def described(record: InstanceRecord, snapshots: Sequence[Snapshot | None]) -> dict[str, Any]:
    """What `--json` prints: the health, the instance's record and the snapshot's fields.

    Of several: their sums, and `instances` with the health and the snapshot of each.
    """
    if len(snapshots) == 1 and snapshots[0] is not None:
        one = _described(snapshots[0])
        return {"health": one.pop("health"), "instance": msgspec.to_builtins(record), **one}
    there = [snapshot for snapshot in snapshots if snapshot is not None]
    return {
        "health": fleet_health([shown.health for shown in _shown(snapshots)]),
        "instance": msgspec.to_builtins(record),
        "paced": record.paced,
        "ready": any(snapshot.ready for snapshot in there),
        "quitting": any(snapshot.quitting for snapshot in there),
        **{name: sum(getattr(snapshot, name) for snapshot in there) for name in _SUMS},
        "instances": [
            {"index": index, **({"health": "silent"} if one is None else _described(one))}
            for index, one in enumerate(snapshots)
        ],
    }


def print_picture(record: InstanceRecord, console: Console) -> bool:
    """Everything at once, on standard output; returns whether all is as it should be."""
    snapshots = snapshots_of(record)
    plain = ascii_only(console)
    if len(snapshots) == 1 and snapshots[0] is not None:
        lines = StatusView(plain).lines(record, snapshots[0], console.width)
    else:
        lines = FleetView(plain).lines(record, _shown(snapshots), console.width)
    with console.capture() as picture:
        for line in lines:
            console.print(line)
    _print(picture.get().rstrip("\n"))
    return _all_good(snapshots)


def ascii_only(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _described(snapshot: Snapshot) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(snapshot)
    del fields["type"]
    return {"health": health_of(snapshot), **fields}


def _shown(snapshots: Sequence[Snapshot | None]) -> list[Shown]:
    return [Shown(one, 0.0 if one is not None else ANSWER_S) for one in snapshots]


def _all_good(snapshots: Sequence[Snapshot | None]) -> bool:
    return all(is_good(shown.health) for shown in _shown(snapshots))


def _print(text: str) -> None:
    """Raises RunError when standard output takes it not."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RunError(f"standard output: {error.strerror}") from None
