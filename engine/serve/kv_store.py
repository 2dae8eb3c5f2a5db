"""KV caches on disk that wait to be fetched: room for new ones, and when old ones go.

The folder itself is the truth, so that files survive a restart and are not forgotten. Only files
that are named as this module names them are ever touched.
"""

import re
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.api.types import RequestError
from engine.api.wording import show
from engine.serve.spec import KvFolder

_NAME = re.compile(r"kv-([0-9a-f]{32})\.safetensors")
_TEMPORARY = re.compile(r"\.kv-([0-9a-f]{32})\.safetensors\.tmp")  # engine.kv.export's
_HEADER_BYTES = 1 << 16  # of a safetensors file, generously


class Stored(msgspec.Struct, frozen=True):
    """One file. written: seconds since 1970."""

    id: str
    path: str
    bytes: int
    written: float
    fetched: bool = False


def to_remove(
    files: Iterable[Stored], now: float, max_age_s: float, max_bytes: int
) -> list[Stored]:
    """The files that have to go: those that are too old, and more until the rest fits.

    What was fetched goes before what was not, and of these the oldest first.
    """
    order = sorted(files, key=lambda file: (not file.fetched, file.written))
    left = sum(file.bytes for file in order)
    gone = []
    for file in order:
        old = now - file.written > max_age_s
        if old:
            gone.append(file)
            left -= file.bytes
    for file in order:
        if left <= max_bytes:
            break
        if file not in gone:
            gone.append(file)
            left -= file.bytes
    return gone


class KvStore:
    """The files of one folder. Methods block on the disk and may be called from any thread."""

    def __init__(self, spec: KvFolder) -> None:
        """Makes the folder, readable by its user alone. Raises OSError."""
        self._spec = spec
        self._folder = Path(spec.path)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._reserved: dict[str, int] = {}  # bytes of files that are being written, by id
        self._fetched: set[str] = set()

    def reserve(self, tokens: int, now: float) -> tuple[str, Path]:
        """Room for the cache of `tokens` tokens until `release`: its id, and where to write it.

        Makes room at the cost of other files. Raises RequestError: 400 when it can never fit, 429
        when caches that are being written leave no room.
        """
        need = tokens * self._spec.bytes_per_token + _HEADER_BYTES
        if need > self._spec.max_bytes:
            raise RequestError(
                f"the KV cache of {tokens} tokens takes {need} bytes; all together may take "
                f"{self._spec.max_bytes} here",
                param="kv_transfer_params",
                code="kv_too_large",
            )
        id_ = secrets.token_hex(16)
        with self._lock:
            room = self._spec.max_bytes - sum(self._reserved.values()) - need
            if room < 0:
                raise RequestError(
                    "the KV caches that are being written leave no room; try again later",
                    param="kv_transfer_params",
                    code="kv_full",
                    status=429,
                )
            self._remove(to_remove(self._scan(), now, self._spec.max_age_s, room))
            self._reserved[id_] = need
        return id_, self._folder / _name(id_)

    def release(self, id_: str) -> None:
        """The file is written, or never will be; from now on it counts with what it takes."""
        with self._lock:
            self._reserved.pop(id_, None)

    def discard(self, id_: str) -> None:
        """Nobody wants the file that may have been written; removes it and gives up its room."""
        with self._lock:
            try:
                for name in (_name(id_), f".{_name(id_)}.tmp"):
                    (self._folder / name).unlink(missing_ok=True)
            finally:
                self._reserved.pop(id_, None)

    def sweep(self, now: float) -> None:
        """Removes what is too old or too much."""
        with self._lock:
            room = self._spec.max_bytes - sum(self._reserved.values())
            self._remove(to_remove(self._scan(), now, self._spec.max_age_s, room))
            self._fetched &= {file.id for file in self._scan()}

    def files(self) -> list[Stored]:
        """What is complete on disk."""
        with self._lock:
            return [file for file in self._scan() if _NAME.fullmatch(Path(file.path).name)]

    def fetch(self, id_: str) -> BinaryIO:
        """The file, open, so that it can be read to its end whatever becomes of its name.

        It goes before others from now on. Raises RequestError (404).
        """
        with self._lock:
            try:
                file = self._path(id_).open("rb")
            except FileNotFoundError:
                raise _not_found(id_) from None
            self._fetched.add(id_)
        return file

    def delete(self, id_: str) -> None:
        """Raises RequestError (404). Whoever has the file open can read on."""
        with self._lock:
            try:
                self._path(id_).unlink()
            except FileNotFoundError:
                raise _not_found(id_) from None
            self._fetched.discard(id_)

    def _path(self, id_: str) -> Path:
        """Where the file lies, if it does. Raises RequestError (404) when it cannot be complete."""
        if not _NAME.fullmatch(_name(id_)) or id_ in self._reserved:
            raise _not_found(id_)
        return self._folder / _name(id_)

    def _scan(self) -> list[Stored]:
        """Every file but those that are being written; what a killed rank left half-done, too."""
        found = []
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)
            if match is None or match[1] in self._reserved:
                continue
            try:
                status = path.stat()
            except FileNotFoundError:  # renamed or removed meanwhile
                continue
            fetched = match[1] in self._fetched
            found.append(Stored(match[1], str(path), status.st_size, status.st_mtime, fetched))
        return found

    def _remove(self, files: list[Stored]) -> None:
        for file in files:
            Path(file.path).unlink(missing_ok=True)
            self._fetched.discard(file.id)


def _name(id_: str) -> str:
    return f"kv-{id_}.safetensors"


def _not_found(id_: str) -> RequestError:
    return RequestError(
        f"there is no KV cache {show(id_)}; it may have been removed for its age or to make room",
        code="kv_not_found",
        status=404,
    )
