"""The secret that the nodes of a launch know each other by: from a file, or the environment."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from engine.curve import SHORTEST_SECRET
from engine.echo import plain
from engine.errors import UsageError
from engine.files import MIB, absolute, read_file

SECRET_VARIABLE = "ASAPCTL_SECRET"


def read_secret(secret_file: str | Path | None, environ: Mapping[str, str]) -> bytes:
    """The secret of a launch, line breaks at its end removed. Raises UsageError."""
    make = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
    if secret_file is not None:
        where = f"--secret-file {plain(str(secret_file))}"
        path = absolute(secret_file, "--secret-file")
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise UsageError(
                    f"{where}: others may read or change it (mode {mode:o}); chmod 600 it"
                )
            secret = read_file(path, MIB, pipes=True)
        except OSError as error:
            raise UsageError(f"{where}: cannot be read: {error.strerror}; {make}") from None
        except ValueError as error:  # a null byte in the name
            raise UsageError(f"{where}: not a file name: {error}") from None
    elif text := environ.get(SECRET_VARIABLE):
        where, secret = SECRET_VARIABLE, os.fsencode(text)
    else:
        raise UsageError(
            "several nodes need a secret, the same on each: give --secret-file FILE, or set "
            f"{SECRET_VARIABLE}; {make}"
        )
    secret = secret.rstrip(b"\r\n")
    if len(secret) < SHORTEST_SECRET:
        raise UsageError(
            f"{where}: the secret has {len(secret)} bytes, and needs {SHORTEST_SECRET} or more; "
            f"{make}"
        )
    return secret
