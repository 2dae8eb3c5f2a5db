"""The folder of what is made once for a user: the demo checkpoint, compiled kernels."""

import os
from pathlib import Path

from engine.errors import UsageError


def cache_folder() -> Path:
    """XDG Base Directory Specification: relative paths do not count. It may not exist yet.

    Raises UsageError where the user has no home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "asapctl"
    try:
        return Path.home().absolute() / ".cache" / "asapctl"
    except RuntimeError:
        raise UsageError(
            "there is no home folder for the demo checkpoint; give a model with --model, or a "
            "cache folder with XDG_CACHE_HOME"
        ) from None
