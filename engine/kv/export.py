"""Write the KV cache of one prompt so that it is either complete on disk or not there."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.control.messages import KvFile
from engine.errors import RunError
from engine.kv.naming import token_sha256


def write_kv(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    token_ids: Sequence[int],
    metadata: Mapping[str, str] | None = None,
) -> KvFile:
    """Write `tensors` (each [tokens, ...]) to `path` as safetensors.

    Written beside `path` under another name, synced, renamed, and the folder synced: once this
    returns the file survives a crash, and until then no file of that name is incomplete.
    metadata: more entries for the file's header (model, model_hash); `tokens` and `token_sha256`
    are added. Raises RunError when the disk does not take it; then nothing of it stays.
    """
    path = Path(path)
    tokens = len(token_ids)
    for name, tensor in tensors.items():
        if tensor.shape[0] != tokens:
            raise ValueError(f"{name} has {tensor.shape[0]} rows for {tokens} tokens")
    digest = token_sha256(token_ids)
    header = {**(metadata or {}), "format": "pt", "tokens": str(tokens), "token_sha256": digest}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, header)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot write the KV cache: {_reason(error)}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return KvFile(
        path=str(path),
        tokens=tokens,
        token_sha256=digest,
        shapes={name: list(tensor.shape) for name, tensor in tensors.items()},
        dtype=_dtype(tensors),
    )


def _reason(error: OSError | SafetensorError) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    # safetensors reports what the system refused as text that ends in `(os error 28)`.
    match = re.search(r"os error (\d+)", str(error))
    return os.strerror(int(match[1])) if match else str(error)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _dtype(tensors: Mapping[str, torch.Tensor]) -> str:
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    return ",".join(sorted(names))
