"""manifest.jsonl beside the KV files: one line for each file, in the order they were finished.

A line is written after its file is complete and before the prompt's result. A prompt that is run
again gets another line; the last one counts.
"""

import os
from pathlib import Path

import msgspec

from engine.control.messages import KvFile
from engine.errors import RunError, UsageError
from engine.kv.folder import unusable

MANIFEST = "manifest.jsonl"


class Entry(msgspec.Struct, frozen=True):
    """file: its name in this folder. shapes: of each tensor, [tokens, ...]."""

    custom_id: str
    file: str
    model: str
    model_hash: str
    dtype: str
    tokens: int
    token_sha256: str
    shapes: dict[str, list[int]]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


def read_manifest(folder: Path) -> dict[str, Entry]:
    """The entries by custom id; a torn last line is left out. Raises UsageError."""
    file = folder / MANIFEST
    entries = {}
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UsageError(f"{file}: cannot read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            entry = _decode(line)
        except ValueError as error:
            raise UsageError(f"{file}, line {number}: not a manifest entry: {error}") from None
        entries[entry.custom_id] = entry
    return entries


class Manifest:
    """The manifest of a folder that a run is filling."""

    def __init__(self, folder: Path, model: str, model_hash: str, overwrite: bool = False) -> None:
        """Make `folder` if need be. Raises UsageError: not writable, or files of another model."""
        self._file = folder / MANIFEST
        self._model = model
        self._model_hash = model_hash
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._file, flags, 0o666)
        except OSError as error:
            raise unusable(folder, error.strerror) from None
        if overwrite:
            os.ftruncate(self._fd, 0)
        try:
            self._check()
        except UsageError:
            self.close()
            raise

    def add(self, custom_id: str, kv: KvFile) -> None:
        """Raises RunError when the disk does not take it; then nothing of the line stays."""
        entry = Entry(
            custom_id=custom_id,
            file=Path(kv.path).name,
            model=self._model,
            model_hash=self._model_hash,
            dtype=kv.dtype,
            tokens=kv.tokens,
            token_sha256=kv.token_sha256,
            shapes=kv.shapes,
        )
        start = os.lseek(self._fd, 0, os.SEEK_END)
        left = memoryview(_encode(entry) + b"\n")
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            os.ftruncate(self._fd, start)
            raise RunError(f"{self._file}: cannot write: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._fd)

    def _check(self) -> None:
        """Cut off a torn last line; refuse a folder that belongs to another model."""
        end = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if end == 0:
                    self._check_first(line)
                end += len(line)
        os.ftruncate(self._fd, end)

    def _check_first(self, line: bytes) -> None:
        try:
            entry = _decode(line)
        except ValueError as error:
            raise UsageError(f"{self._file}, line 1: not a manifest entry: {error}") from None
        if entry.model_hash != self._model_hash:
            raise UsageError(
                f"{self._file} lists files of another model ({entry.model}); choose another "
                "--kv-dir, or start anew with --overwrite"
            )
