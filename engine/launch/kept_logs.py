"""The logs of instances that failed, where their user finds them afterwards."""

import os
import shutil
import time
from pathlib import Path

_MOST = 20


def kept_folder() -> Path:
    """Holds one folder a failed instance, `<name>.<date>-<time>`; the latest twenty."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state).absolute() / "asapctl" / "logs"


def keep_logs(logs: Path, name: str) -> Path:
    """Moves the log folder of the instance `name` there, and says where. Raises OSError."""
    folder = kept_folder()
    folder.mkdir(parents=True, exist_ok=True)
    base = f"{name}.{time.strftime('%Y%m%d-%H%M%S')}"
    kept, number = folder / base, 2
    while kept.exists():
        kept, number = folder / f"{base}.{number}", number + 1
    shutil.move(logs, kept)
    os.utime(kept)  # it is as old as the failure
    for old in _by_age(folder)[:-_MOST]:
        shutil.rmtree(old, ignore_errors=True)
    return kept


def find_kept(name: str) -> Path | None:
    """The latest kept logs of an instance of that name; the full name of a folder is one too."""
    try:
        kept = _by_age(kept_folder())
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    found = [path for path in kept if name in {path.name, path.name.split(".")[0]}]
    return found[-1] if found else None


def _by_age(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir()), key=lambda path: path.stat().st_mtime_ns)
