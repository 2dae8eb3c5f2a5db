"""What an existing output already holds: done lines stay, failed and torn ones are done again."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.api.ids import id_hash
from engine.api.types import Origin
from engine.errors import RunError, UsageError
from engine.offline.output import Output, replace

_START = b'{"id":"batch_req_'
_REMEDY = "run it with the same ones, choose another -o, or start anew with --overwrite"


class _Kv(msgspec.Struct):
    path: str


class _Body(msgspec.Struct):
    system_fingerprint: str | None = None
    kv: _Kv | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _Record(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response
    error: Any = None


_decode = msgspec.json.Decoder(_Record).decode


class Done:
    """Which lines an earlier run has finished: 16 bytes for each id, 16 for its line.

    lost: results that were given up because their KV file is gone.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._records: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, custom_id: str, record: str) -> None:
        self._records[id_hash(custom_id)] = id_hash(record)

    def holds(self, custom_id: str, record: str) -> bool | None:
        """True: done. None: not done. False: this id is done, but its line was another one."""
        digest = self._records.get(id_hash(custom_id))
        return None if digest is None else digest == id_hash(record)


def take_stock(output: Output, fingerprint: str, overwrite: bool, needs_kv: bool = False) -> Done:
    """Read `output`, drop its failed and torn lines, and say what is done.

    fingerprint: of the model and options now; the records' own must be equal. needs_kv: a result
    whose KV file is gone is dropped too. Raises UsageError when the fingerprints differ, or when
    the file is no output of ours; then it stays as it is.
    """
    done = Done()
    if not output.regular or output.path is None:
        return done
    if overwrite:
        os.ftruncate(output.fd, 0)
        return done
    dropped = 0
    end = 0
    for number, start, raw in _lines(output.fd):
        if not raw.endswith(b"\n"):
            _check_torn(output, number, raw)
            break
        end = start + len(raw)
        record = _read(output, number, raw)
        if not _succeeded(record):
            dropped += 1
            continue
        _check_fingerprint(output, record, fingerprint)
        if needs_kv and not _has_kv(record):
            done.lost += 1
            continue
        done.add(record.custom_id, record.id)
    os.ftruncate(output.fd, end)
    if dropped + done.lost:
        _drop(output, done)
    return done


def changed_line(origin: Origin, output: str) -> UsageError:
    """For a line whose id is done, but whose text is not what it was then."""
    return UsageError(
        f"line {origin.number}: {output} holds a result for the id {origin.custom_id!r}, but of "
        "another line than this one; choose another -o, or start anew with --overwrite"
    )


def _succeeded(record: _Record) -> bool:
    return record.error is None and record.response.status_code == 200


def _has_kv(record: _Record) -> bool:
    kv = record.response.body.kv
    return kv is not None and Path(kv.path).is_file()


def _drop(output: Output, done: Done) -> None:
    """Rewrite the file with what is done: a copy first, then one rename."""
    assert output.path is not None
    # A short name: that of the output may be as long as names can be.
    copy = output.path.with_name(f".{_hash(output.path.name)}.asapctl-tmp")
    copy.unlink(missing_ok=True)
    try:
        mode = os.fstat(output.fd).st_mode & 0o777
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(copy, flags, mode)
        kept = Output(fd, str(copy), copy)
        for number, _, raw in _lines(output.fd):
            record = _read(output, number, raw)
            if _succeeded(record) and done.holds(record.custom_id, record.id):
                kept.append(raw)
        os.fchmod(fd, mode)
        replace(output, fd, copy)
    except OSError as error:
        copy.unlink(missing_ok=True)
        raise RunError(
            f"{copy}: cannot write: {error.strerror}; {output.name} is as it was"
        ) from None
    except RunError:
        copy.unlink(missing_ok=True)
        raise


def _hash(name: str) -> str:
    return hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()


def _lines(fd: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes (with its LF) of each line, from the start of the file."""
    start = 0
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            yield number, start, raw
            start += len(raw)


def _read(output: Output, number: int, raw: bytes) -> _Record:
    try:
        if not raw.startswith(_START):
            raise ValueError("it does not begin like one")
        return _decode(raw)
    except ValueError as error:  # msgspec's and Unicode errors are ValueErrors
        raise UsageError(
            f"{output.name}, line {number}: not a result of asapctl prefill ({error}); "
            "choose another -o, or replace the file with --overwrite"
        ) from None


def _check_torn(output: Output, number: int, raw: bytes) -> None:
    """Refuse to cut off something that no run of ours has left."""
    if not (raw.startswith(_START) or _START.startswith(raw)):
        _read(output, number, raw)


def _check_fingerprint(output: Output, record: _Record, fingerprint: str) -> None:
    before = record.response.body.system_fingerprint or ""
    if before == fingerprint:
        return
    if _model(before) != _model(fingerprint):
        what = "of another model than this one"
    else:
        what = "of other options (--logprobs, --prompt-logprobs, --kv-dir or the dtype differs)"
    raise UsageError(f"{output.name} holds results {what}; {_REMEDY}")


def _model(fingerprint: str) -> str:
    return fingerprint.rpartition("_")[0]
