"""A topology's name and a model -> a plan, or everything that is wrong with both at once."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.echo import is_utf8
from engine.errors import UsageError
from engine.files import exists
from engine.launch.model_dir import DEMO, find_model_dir, refuse_config_only
from engine.launch.signals import import_torch
from engine.model.config import load_config
from engine.topology.load import TopologyError, load_topology
from engine.topology.schema import Topology

if TYPE_CHECKING:
    from engine.launch.plan import Plan
    from engine.launch.resources import NodeView

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Problems:
    """Collects UsageErrors of steps that do not depend on each other."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A UsageError inside is kept for `raise_all`."""
        try:
            yield
        except UsageError as error:
            self._found.append(str(error))

    def raise_all(self) -> None:
        if self._found:
            raise UsageError("\n".join(self._found))


def plan_of(
    topology: str,
    overrides: Sequence[str],
    model: str | Path | None,
    *,
    keep_kv: bool | Callable[[Topology], bool] = False,
    on_topology: Callable[[Topology], None] = lambda topology: None,
    on_note: Callable[[str], None] = lambda note: None,
    only_to_look: bool = False,
    assume_devices: bool = False,
    node: "NodeView | None" = None,
) -> "Plan":
    """The plan for a topology (a file, or a packaged one's name) and a model (None: its own).

    only_to_look: a packaged config will do, without weights. assume_devices: as if this machine had
    the devices and the memory that the topology asks for. on_topology: what else has to be looked
    after in a topology that has been read; it may raise UsageError. node: which one of several
    nodes this is; by default the only one.

    Raises UsageError with every problem of all of it, one a line.
    """
    try:
        loaded = load_topology(topology, overrides)
    except UsageError as error:
        problems = [str(error)]
        try:
            _check_rest(error.usable if isinstance(error, TopologyError) else None, model, node)
        except UsageError as more:
            problems.append(str(more))
        raise UsageError("\n".join(problems)) from None
    found = Problems()
    plan = None
    with found.gathered():
        on_topology(loaded)
    with found.gathered():
        _check_local(loaded, model)
        import_torch()
        from engine.launch.plan import make_plan

        model_dir = _find(loaded, model, on_note)
        if not (only_to_look or loaded.is_paced):
            refuse_config_only(model_dir)
        plan = make_plan(
            loaded,
            model_dir,
            keep_kv(loaded) if callable(keep_kv) else keep_kv,
            assume="devices" if assume_devices else "nothing",
            node=node,
        )
    found.raise_all()
    assert plan is not None
    return plan


def _find(
    topology: Topology,
    model: str | Path | None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Path:
    model_dir = find_model_dir(topology, model, on_note)
    if not is_utf8(model_dir):
        raise UsageError(
            f"model directory {model_dir}: the path is not UTF-8, and what reads models takes no "
            "other; rename it, or give a link to it with --model"
        )
    return model_dir


def _check_rest(
    topology: Topology | None, model: str | Path | None, node: "NodeView | None"
) -> None:
    """What is wrong besides the keys that are known to be: their defaults stand in for them, so
    nothing is said about memory. Without any topology, what is wrong with the model.
    """
    if topology is None:
        if model is not None and str(model) != DEMO:
            _check_local(Topology(), model)
            load_config(find_model_dir(Topology(), model))
        return
    _check_local(topology, model)
    import_torch()
    from engine.launch.plan import make_plan

    make_plan(topology, _find(topology, model), assume="everything", node=node)


def _check_local(topology: Topology, model: str | Path | None) -> None:
    """Raises UsageError for a model that is named as on the Hugging Face Hub, and is not here."""
    name = topology.model.path if model is None else str(model)
    if name == DEMO or not _HUB_ID.fullmatch(name):
        return
    folder = topology.resolve("model", "path", name) if model is None else Path(name).absolute()
    if not exists(folder):
        local = f"models/{folder.name}"
        raise UsageError(
            f"model {name}: there is no folder {folder}. Models are not fetched from a hub: if it "
            f"is one of the Hugging Face Hub, download it first (hf download {name} --local-dir "
            f"{local}), and give that folder (--model {local})"
        )
