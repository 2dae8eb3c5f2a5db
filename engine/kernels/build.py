"""Compiles the kernels once for each machine, where it has a C++ compiler."""

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from engine.cache import cache_folder
from engine.errors import UsageError

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu.cpp")
_CPUS = Path("/proc/cpuinfo")
_OPTIONS = ("-O3", "-march=native", "-std=gnu++17", "-fno-math-errno", "-shared", "-fPIC")
_COMPILE_S = 60
COMPILERS = ("c++", "g++", "clang++")


@cache
def library() -> ctypes.CDLL | None:
    """None where they cannot be compiled: what is missing is logged, and plain code does it all.

    The compiler is $CXX, or the first of COMPILERS that there is. The result is kept in
    the cache folder, by the source, the compiler's command and what the processor can do.
    """
    compiler = find_compiler(os.environ)
    if compiler is None:
        log.info("no C++ compiler: attention and norms are torch's own, which are slower")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError, UsageError) as error:
        log.warning("kernels are not compiled: %s", _reason(error))
        return None


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """Its path."""
    names = filter(None, (environ.get("CXX"), *COMPILERS))
    path = environ.get("PATH")
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _compiled(compiler: str) -> Path:
    command = [compiler, *_OPTIONS]
    parts = (_SOURCE.read_text(), " ".join(command), _processor())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_folder() / f"kernels-{name}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may be here at once: each replaces the others' file with the same one.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="kernels-") as folder:
            made = Path(folder) / target.name
            command += ["-o", str(made), str(_SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            made.replace(target)
    return target


def _processor() -> str:
    """What it can do: a cache folder may be shared by different machines."""
    try:
        found = re.search(r"^(flags|Features)\s*:.*$", _CPUS.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(0) if found else ""


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return said[0] if said else f"the compiler returned {error.returncode}"
    return str(error)
