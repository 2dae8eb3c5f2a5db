"""Imports in a process of their own: what they crash, print or leave behind stays there."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 180.0
_MARK = "asapctl-probe:"

_PROGRAM = """
import json, sys
found = {{}}
try:
    {code}
except BaseException as error:
    found = {{"error": str(error) or type(error).__name__}}
sys.stdout.write("\\n{mark}" + json.dumps(found) + "\\n")
sys.stdout.flush()
"""

_TORCH = """import torch
    found["version"] = torch.__version__
    found["cuda"] = torch.version.cuda if torch.backends.cuda.is_built() else None
    dist = torch.distributed
    if dist.is_available():
        found["gloo"] = dist.is_gloo_available()
        if dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))"""

_TORCH_NPU = """import torch, torch_npu
    found["version"] = torch_npu.__version__"""


@dataclass(frozen=True)
class Imported:
    """found: what the import told. error: why it failed, in its own words, None where it did not.
    missing: the shared library that the loader did not find, where that was it.
    """

    found: dict[str, Any]
    error: str | None

    @property
    def missing(self) -> str | None:
        match = re.match(r"(\S+\.so\S*): cannot open shared object file", self.error or "")
        return match.group(1) if match else None


def probe_torch(environ: Mapping[str, str] = os.environ) -> Imported:
    """found: version, cuda (that it is built for, or None), gloo, nccl (its version, if built)."""
    return _run(_TORCH, environ)


def probe_torch_npu(environ: Mapping[str, str] = os.environ) -> Imported:
    """found: version."""
    return _run(_TORCH_NPU, environ)


def _run(code: str, environ: Mapping[str, str]) -> Imported:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(code=code, mark=_MARK)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={
                **environ,
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                "PYTHONSAFEPATH": "1",
                "OMP_NUM_THREADS": "1",
            },
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Imported({}, f"the import does not end within {_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Imported({}, f"no process can be started: {error.strerror}")
    for line in reversed(done.stdout.decode(errors="replace").splitlines()):
        if line.startswith(_MARK):
            found = json.loads(line[len(_MARK) :])
            return Imported(found, found.pop("error", None))
    if done.returncode < 0:
        return Imported({}, f"the import is ended by signal {-done.returncode}")
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return Imported({}, last[0] if last else f"the import ends with code {done.returncode}")
