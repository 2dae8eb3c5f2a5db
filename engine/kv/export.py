"""Write the KV cache of one prompt so that it is either complete on disk or not there."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.control.messages import KvFile
from engine.errors import RunError
from engine.kv.naming import token_sha256

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_kv(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    token_ids: Sequence[int],
    metadata: Mapping[str, str] | None = None,
) -> KvFile:
    """Write `tensors` (each [tokens, ...], on any device) to `path` as safetensors.

    The file has no name until it is complete and synced, so whoever is killed while writing leaves
    nothing; then the folder is synced, and once this returns the file survives a crash. metadata:
    more entries for the file's header (model, model_hash); `tokens` and `token_sha256` are added.
    Raises RunError when the disk does not take it.
    """
    path = Path(path)
    tokens = len(token_ids)
    for name, tensor in tensors.items():
        if tensor.shape[0] != tokens:
            raise ValueError(f"{name} has {tensor.shape[0]} rows for {tokens} tokens")
    digest = token_sha256(token_ids)
    header = {**(metadata or {}), "format": "pt", "tokens": str(tokens), "token_sha256": digest}
    try:
        with _nameless(path) as fd:
            for part in _serialized(tensors, header):
                _write(fd, part)
            os.fsync(fd)
            _name(fd, path)
        _sync(path.parent)
    except OSError as error:
        raise RunError(f"{path}: cannot write the KV cache: {error.strerror}") from None
    return KvFile(
        path=str(path),
        tokens=tokens,
        token_sha256=digest,
        shapes={name: list(tensor.shape) for name, tensor in tensors.items()},
        dtype=_dtype(tensors),
    )


def _serialized(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The safetensors format, a tensor at a time: the library's own `save` needs all of it twice.

    8 bytes with the header's length, little-endian; the header, JSON padded to 8 bytes; the data.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        yield tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


@contextlib.contextmanager
def _nameless(beside: Path) -> Iterator[int]:
    """A new file in the same folder, without a name where the file system can do that."""
    mode = os.O_WRONLY | os.O_CLOEXEC
    fallback = _temporary(beside)
    try:
        fd = os.open(beside.parent, mode | os.O_TMPFILE, 0o666)
    except OSError:  # some network file systems
        fd = os.open(fallback, mode | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)
        fallback.unlink(missing_ok=True)


def _name(fd: int, path: Path) -> None:
    """Gives the file its name at once, in place of another that may have had it."""
    temporary = _temporary(path)
    if os.fstat(fd).st_nlink == 0:
        temporary.unlink(missing_ok=True)
        # Only with a src_dir_fd, which an absolute path ignores, does os.link follow the link.
        os.link(f"/proc/self/fd/{fd}", temporary, src_dir_fd=fd, follow_symlinks=True)
    temporary.replace(path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _write(fd: int, left: memoryview) -> None:
    while left:
        left = left[os.write(fd, left) :]


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _dtype(tensors: Mapping[str, Tensor]) -> str:
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    return ",".join(sorted(names))
