"""Which checkpoint a run uses, and the small one that is there to try things with."""

from collections.abc import Callable
from pathlib import Path

import topologies
from engine import __version__
from engine.cache import cache_folder
from engine.errors import UsageError
from engine.files import absolute, exists, is_file
from engine.topology.schema import Topology

DEMO = "demo"
_CONFIGS = Path(topologies.__file__).absolute().parent / "models"


def find_model_dir(
    topology: Topology,
    model: str | Path | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Path:
    """The folder of the checkpoint: `model` (counted from the working folder), or the topology's
    `model.path`. "demo" is made in the user's cache folder at its first use, and `on_note` told.
    The name of a packaged config is that where there is no such folder (`is_config_only`).

    Raises UsageError: no such home folder, or the demo cannot be made. Whether a folder holds a
    model is for `engine.launch.plan` to say.
    """
    path = str(model) if model is not None else topology.model.path
    if path == DEMO:
        return _demo_dir(on_note)
    if model is not None:
        folder = absolute(path, "--model")
    else:
        folder = topology.resolve("model", "path", path)
    if path in packaged_configs() and not exists(folder):
        return _CONFIGS / path
    return folder


def packaged_configs() -> tuple[str, ...]:
    """The names of models of which asapctl has the config, to plan with, and nothing else."""
    if not _CONFIGS.is_dir():
        return ()
    return tuple(sorted(path.parent.name for path in _CONFIGS.glob("*/config.json")))


def is_config_only(model_dir: Path) -> bool:
    return model_dir.parent == _CONFIGS


def refuse_config_only(model_dir: Path) -> None:
    """Raises UsageError for a model that has no weights to compute with."""
    if is_config_only(model_dir):
        raise UsageError(
            f"model {model_dir.name}: asapctl has its config only, to plan with (asapctl check); "
            "give the folder of a checkpoint in float32, float16 or bfloat16 with --model"
        )


def _demo_dir(on_note: Callable[[str], None]) -> Path:
    target = cache_folder() / f"demo-{__version__}"
    if is_file(target / "config.json"):
        on_note(f"no model given: using the demo checkpoint in {target}")
        return target
    from engine.model.demo import make_demo_checkpoint

    on_note(f"no model given: making a small demo checkpoint in {target}, once")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        make_demo_checkpoint(target)
    except OSError as error:
        raise UsageError(
            f"{target}: the demo checkpoint cannot be written: {error.strerror}; give a model "
            "with --model, or another cache folder with XDG_CACHE_HOME"
        ) from None
    return target
