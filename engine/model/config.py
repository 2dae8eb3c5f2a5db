"""From a model directory in Hugging Face layout to a ModelConfig. No torch."""

from pathlib import Path
from typing import Any

from engine.echo import shown
from engine.errors import UsageError
from engine.files import MOST_JSON_BYTES, is_file, parse_json, read_file
from engine.model.architecture import ModelConfig
from engine.model.families import READERS
from engine.model.fields import Fields

__all__ = ["ModelConfig", "load_config"]


def load_config(model_dir: Path) -> ModelConfig:
    """Reads config.json (and the end tokens of generation_config.json, which come first).

    Raises UsageError for a missing directory or file, an unknown model type, and every value that
    this engine cannot honour, all of those at once.
    """
    path = model_dir / "config.json"
    fields = Fields(_read_object(path, model_dir), path)
    model_type = fields.raw.get("model_type")
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise UsageError(
            f"{path}: model_type {shown(model_type)} is not supported "
            f"(known architectures: {', '.join(READERS)})"
        )
    generation = model_dir / "generation_config.json"
    if is_file(generation):
        end = _read_object(generation, model_dir).get("eos_token_id")
        if end is not None:
            fields.raw["eos_token_id"] = end
    config = reader(fields)
    fields.finish()
    return config


def _read_object(path: Path, model_dir: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_file(path, MOST_JSON_BYTES))
    except NotADirectoryError:
        raise UsageError(
            f"model {model_dir} is a file; give the directory of the checkpoint"
        ) from None
    except FileNotFoundError:
        if not model_dir.exists():
            raise UsageError(f"model directory {model_dir} does not exist") from None
        raise UsageError(
            f"{path} is missing: {model_dir} is not a checkpoint in Hugging Face layout"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return value
