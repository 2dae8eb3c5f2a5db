"""Reading a checkpoint's safetensors files, and checking that they fit a config.

Headers are parsed here, so that names, shapes and truncation are known without touching a weight;
weights come through safetensors slices, so that a rank reads its own rows and no others.
"""

import hashlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.echo import plain, shown
from engine.errors import UsageError
from engine.files import MOST_JSON_BYTES, is_file, parse_json, read_file
from engine.model.architecture import ModelConfig
from engine.model.extent import extent_problems
from engine.model.safetensors_header import Stored, read_header
from engine.model.weights import claims, is_ignored

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_READABLE = {"F32", "F16", "BF16", "F64"}
# What besides the weights decides a result: the files whose content is hashed whole.
_HASHED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class Checkpoint:
    """All tensors of a model directory, by name.

    Raises UsageError when there are no safetensors weights, a shard is missing, unreadable or
    truncated, or the index and the shards disagree.
    """

    def __init__(self, model_dir: Path):
        self.model_dir = model_dir
        self.tensors: dict[str, Stored] = {}
        self._open: dict[Path, Any] = {}
        index = _read_index(model_dir)
        self.files = sorted({model_dir / file for file in index.values()})
        if not index:
            self.files = [_single_file(model_dir)]
        for file in self.files:
            for name, stored in read_header(file).items():
                if index.get(name, file.name) == file.name:
                    self.tensors[name] = stored
        for name, shard in index.items():
            if name not in self.tensors:
                raise UsageError(
                    f"{model_dir / shard}: tensor {plain(name)} is in the index, not here"
                )

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or `rows` of its first dimension, in the dtype it is stored in."""
        stored = self._stored(name)
        if stored.dtype not in _READABLE:
            raise UsageError(_unreadable(name, stored))
        try:
            if stored.file not in self._open:
                self._open[stored.file] = safe_open(stored.file, framework="pt")
            view = self._open[stored.file].get_slice(name)
            tensor: Tensor = view[:] if rows is None else view[rows]
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{stored.file}: tensor {name} cannot be read: {error}") from None
        return tensor

    def _stored(self, name: str) -> Stored:
        try:
            return self.tensors[name]
        except KeyError:
            raise UsageError(f"{self.model_dir}: tensor {name} is missing") from None


def audit(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """Every way in which the tensors do not fit the config, over both roles together.

    Missing tensors, wrong shapes, dtypes that cannot be read, and tensors that no role reads or
    that two do. Empty when all is well.
    """
    problems = [
        f"{checkpoint.model_dir / 'config.json'}: {problem}"
        for problem in extent_problems(checkpoint.tensors, config)
    ]
    if problems:  # to name each tensor that is missing could take forever
        return problems
    owner: dict[str, str] = {}
    for role, tensors in claims(checkpoint.tensors, config).items():
        for name, shape in tensors.items():
            if name in owner:
                problems.append(f"tensor {name} is read by both {owner[name]} and {role}")
            owner[name] = role
            stored = checkpoint.tensors.get(name)
            if stored is None:
                problems.append(f"{checkpoint.model_dir}: tensor {name} is missing")
            elif stored.shape != shape:
                problems.append(
                    f"{stored.file}: tensor {name} has shape {shown(list(stored.shape))}, "
                    f"the config asks for {list(shape)}"
                )
            elif stored.dtype not in _READABLE:
                problems.append(_unreadable(name, stored))
    problems += [
        f"{stored.file}: tensor {plain(name)} is no part of a {config.architecture} model"
        for name, stored in checkpoint.tensors.items()
        if name not in owner and not is_ignored(name, config)
    ]
    return problems


def model_hash(model_dir: Path, weights: bool = True) -> str:
    """64 hex digits that differ when the model does: small files whole, of each weight file its
    size, its header and sixteen blocks of its content. Cheap, for telling models apart; it is no
    protection against a forger. weights: whether they count.
    """
    digest = hashlib.sha256()
    for name in _HASHED:
        path = model_dir / name
        try:
            if is_file(path):
                digest.update(name.encode() + _content_hash(path))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    for file in Checkpoint(model_dir).files if weights else ():
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            header = int.from_bytes(data.read(8), "little")
            digest.update(data.read(header))
            for block in range(16):
                data.seek(8 + header + (size - 8 - header) * block // 16)
                digest.update(data.read(4096))
    return digest.hexdigest()


def _content_hash(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _read_index(model_dir: Path) -> dict[str, str]:
    """Tensor name to shard file; empty when the checkpoint has no index."""
    path = model_dir / _INDEX
    try:
        weight_map = parse_json(read_file(path, MOST_JSON_BYTES))["weight_map"]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    except (KeyError, TypeError):
        raise UsageError(f"{path} is no safetensors index: it has no weight_map") from None
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise UsageError(f"{path}: weight_map must map tensor names to file names")
    return weight_map


def _single_file(model_dir: Path) -> Path:
    path = model_dir / _SINGLE
    if is_file(path):
        return path
    if any(model_dir.glob("*.bin")):
        raise UsageError(f"{model_dir} holds no safetensors weights, only .bin; convert them first")
    raise UsageError(f"{model_dir} holds no weights: neither {_SINGLE} nor {_INDEX} is there")


def _unreadable(name: str, stored: Stored) -> str:
    return (
        f"{stored.file}: tensor {name} is stored as {plain(stored.dtype)}; quantised weights are "
        "not supported, use a float32, float16 or bfloat16 checkpoint"
    )
