"""The header of a safetensors file: which tensors it holds, checked before a weight is touched.

The format: the header's length (8 bytes, little endian), the header (JSON), then the data, in which
tensors follow one another without a gap (https://huggingface.co/docs/safetensors).
"""

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from engine.echo import plain, shown
from engine.errors import UsageError
from engine.files import parse_json

# The format's own limit.
_MOST_HEADER_BYTES = 100_000_000
_MOST = 2**63 - 1
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


class Stored(NamedTuple):
    """Where a tensor lies and what its header says of it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class _Entry(NamedTuple):
    begin: int
    end: int
    name: str
    stored: Stored


def read_header(file: Path) -> dict[str, Stored]:
    """Tensor name to where it lies. Raises UsageError: missing, truncated, or no such file; a
    tensor whose place does not fit its shape is named.
    """
    size, data_size, entries = _read(file)
    found = [_entry(file, name, entry) for name, entry in entries.items() if name != "__metadata__"]
    metadata = entries.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UsageError(f"{file} is not a safetensors file: its __metadata__ is not of strings")
    end = max((entry.end for entry in found), default=0)
    if end > data_size:
        raise UsageError(f"shard {file} is truncated: {size} bytes of {size - data_size + end}")
    _check_places(file, found, data_size)
    return {entry.name: entry.stored for entry in found}


def _read(file: Path) -> tuple[int, int, dict[str, Any]]:
    """The sizes of the file and of its data, in bytes, and the header's entries."""
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"shard {file} is not a regular file")
        size = file.stat().st_size
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if size < 8 or length > size - 8:
                raise UsageError(f"{file} is truncated: {size} bytes do not hold its header")
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            entries = parse_json(data.read(length))
    except FileNotFoundError:
        raise UsageError(f"shard {file} is missing") from None
    except OSError as error:
        raise UsageError(f"shard {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file} is not a safetensors file: {error}") from None
    if not isinstance(entries, dict):
        raise UsageError(f"{file} is not a safetensors file: its header is not an object")
    return size, size - 8 - length, entries


def _entry(file: Path, name: str, entry: Any) -> _Entry:
    where = f"{file}: tensor {plain(name)}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise UsageError(
            f"{where} has no dtype, shape and data_offsets; copy the file again"
        ) from None
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise UsageError(
            f"{where} has the impossible dtype {shown(dtype)} or shape {shown(shape)}; copy the "
            "file again"
        )
    if not _is_size(begin) or not _is_size(end) or begin > end:
        raise UsageError(
            f"{where} has the impossible data_offsets {shown([begin, end])}; copy the file again"
        )
    bits = _BITS.get(dtype)
    if bits is not None and (end - begin) * 8 != prod(shape) * bits:
        raise UsageError(
            f"{where} has {end - begin} bytes, but {shown(shape)} of {dtype} takes "
            f"{prod(shape) * bits // 8}; copy the file again"
        )
    return _Entry(begin, end, name, Stored(file, dtype, tuple(shape)))


def _check_places(file: Path, entries: list[_Entry], data_size: int) -> None:
    """Raises UsageError unless the tensors fill the data, each byte by one of them."""
    before, covered = "the header", 0
    for entry in sorted(entries):
        if entry.begin != covered:
            relation = "overlaps" if entry.begin < covered else "leaves a gap after"
            raise UsageError(
                f"{file}: tensor {plain(entry.name)} {relation} {before}; copy the file again"
            )
        before, covered = f"tensor {plain(entry.name)}", entry.end
    if covered != data_size:
        raise UsageError(
            f"{file} has {data_size - covered} bytes after its last tensor; copy the file again"
        )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST
