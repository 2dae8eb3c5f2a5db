"""Whether KV files can be written to a folder, told without making it."""

import os
from pathlib import Path

from engine.echo import is_utf8
from engine.errors import UsageError


def check_folder(folder: Path) -> None:
    """Raises UsageError when `folder` can be neither used nor made."""
    existing = folder.absolute()
    if not is_utf8(existing):
        raise unusable(folder, "results name the files in JSON, so the path must be UTF-8")
    while not os.path.lexists(existing):
        existing = existing.parent
    if not os.path.isdir(existing):  # noqa: PTH112 - which raises where nobody may look
        raise unusable(folder, f"{existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise unusable(folder, f"no permission to write in {existing}")


def unusable(folder: Path, reason: str | None) -> UsageError:
    return UsageError(f"{folder}: cannot write KV files here: {reason}; choose another --kv-dir")
