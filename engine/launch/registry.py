"""Which instances of this user run: the record that each keeps in its runtime folder."""

import contextlib
import secrets
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import AsapError, RunError, UsageError
from engine.launch.runtime_folder import base_folder, check_name, living_folders

DEFAULT_NAME = "default"
_RECORD = "instance.json"


class NoInstanceError(AsapError):
    """There is no such instance."""

    exit_code = 3


class InstanceRecord(msgspec.Struct, frozen=True):
    """What anybody may know of an instance.

    pid: of its supervisor. started: Unix seconds. url: where it serves HTTP, None if it does not.
    controllers: the ZeroMQ addresses of its controllers, one for each of its instances; controller:
    the first. launch: of a node that is not node 0, where that is; it has no controller. paced: as
    in Snapshot.
    """

    name: str
    pid: int
    command: Literal["launch", "prefill", "node"]
    model: str
    topology: str
    started: float
    controller: str
    controllers: list[str] = []
    launch: str = ""
    url: str | None = None
    state: Literal["starting", "ready"] = "starting"
    paced: str | None = None

    @property
    def folder(self) -> Path:
        """Its runtime folder."""
        return base_folder() / self.name

    @property
    def logs(self) -> Path:
        return self.folder / "logs"


def write_record(folder: Path, record: InstanceRecord) -> None:
    """Puts `record` into the runtime folder, whole or not at all. Raises OSError."""
    temporary = folder / f".{_RECORD}.{secrets.token_hex(4)}"
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.replace(folder / _RECORD)


def read_record(folder: Path) -> InstanceRecord | None:
    """The record in a runtime folder; None when there is none yet, or none any more."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / _RECORD).read_bytes(), type=InstanceRecord)
    return None


def list_instances() -> list[InstanceRecord]:
    """Every running instance, by name. What dead ones left behind is removed on the way.

    Raises RunError when there can be no runtime folder.
    """
    try:
        records = map(read_record, living_folders())
        return [record for record in records if record is not None]
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise RunError(f"cannot look for instances: {why}") from None


def find_instance(name: str | None) -> InstanceRecord:
    """The instance `name`; without a name, the only one that there is.

    Raises NoInstanceError, or UsageError when several run and none was named.
    """
    running = list_instances()
    if name is None:
        if not running:
            raise NoInstanceError("no instance is running")
        if len(running) > 1:
            names = ", ".join(record.name for record in running)
            raise UsageError(f"several instances are running; name one of them: {names}")
        return running[0]
    for record in running:
        if record.name == name:
            return record
    names = ", ".join(record.name for record in running) or "none"
    raise NoInstanceError(f'no instance is named "{name}"; running: {names}')


def check_free(name: str) -> None:
    """Raises UsageError when an instance cannot be called `name`, or another one already is."""
    check_name(name)
    for record in list_instances():
        if record.name == name:
            raise UsageError(taken(name, record))


def taken(name: str, record: InstanceRecord | None = None) -> str:
    """Says that an instance `name` is running; its record is read if it is not given."""
    if record is None:
        record = read_record(base_folder() / name)
    who = f"pid {record.pid}" if record is not None else "starting"
    return (
        f'an instance named "{name}" is already running ({who}); '
        f"stop it with `asapctl stop {name}`, or choose another --name"
    )
