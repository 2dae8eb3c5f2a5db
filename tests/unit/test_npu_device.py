"""The NPU device, and the stand-in for torch-npu that its tests use."""

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from engine.device import base, fused, grouped_mlp
from engine.device import npu as npu_module
from engine.device.npu import Npu
from engine.errors import RunError
from helpers.torch_npu_double import (
    EVENT,
    HCCL,
    HCCL_OPTIONS,
    OPERATORS,
    PYTHON,
    VERSION,
    ForbiddenError,
    torch_npu_double,
)

SOURCES = ("npu.py", "npu_operators.py")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of torch_npu, without a device set; what is registered is forgotten afterwards."""
    double = torch_npu_double()
    monkeypatch.setitem(sys.modules, "torch_npu", double)
    monkeypatch.setattr(fused, "_registered", {})
    return double


@pytest.fixture
def npu(double: Any) -> Any:
    double.npu.set_device(0)
    return double


# --- the device ------------------------------------------------------------------------------


def test_a_device_says_what_it_is(double: Any) -> None:
    device = base.open_device("npu")
    assert (device.kind, device.backend, device.torch) == ("npu", "hccl", torch.device("npu", 0))
    assert device.memory() == (60 << 30, 64 << 30)
    assert device.name().startswith("Ascend910")
    assert double.npu.current == 0


def test_opening_registers_the_operators(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Npu()
    operators = fused.fused(torch.device("npu"))
    without = [name for name, operator in vars(operators).items() if operator is None]
    assert without == ["gated", "add_rows", "prepare"]  # experts do the first two; no Triton
    assert operators.experts != grouped_mlp.serve
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(grouped_mlp, "available", lambda: True)
    Npu()
    assert fused.fused(torch.device("npu")).experts == grouped_mlp.serve


def test_streams_wait_for_events_and_the_host_does_when_it_asks(double: Any) -> None:
    device = Npu()
    main = double.npu.current_stream()
    side = device.new_stream()
    with device.on_stream(side):
        event = device.record()
        assert double.npu.current_stream() is side
    assert double.npu.current_stream() is main and event.stream is side
    device.wait_event(event)
    device.wait_event(None)
    assert double.npu.waits == [(main, event)]
    device.synchronize(event)
    device.synchronize(None)
    assert double.npu.waits[1:] == [("host", event)]
    with device.on_stream(None):
        assert double.npu.current_stream() is main


def test_a_process_group_is_no_default_group(double: Any) -> None:
    store = HashStore()
    group = Npu().process_group(store, 1, 2, timedelta(seconds=5))
    assert (group.store, group.rank, group.size) == (store, 1, 2)
    assert group.options._timeout == timedelta(seconds=5)
    assert group.options.global_ranks_in_group == [0, 1]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(RunError, match=r"package torch_npu; .*asapctl\[npu\]"):
        Npu()


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        (
            "ImportError('libhccl.so: cannot open shared object file: No such file or directory')",
            r"library libhccl\.so is not found; install CANN .*set_env\.sh",
        ),
        ("ImportError('undefined symbol: x')", "undefined symbol: x; install CANN"),
        ("RuntimeError('Two accelerators\\nmore')", "does not load: Two accelerators; "),
    ],
)
def test_a_library_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: str, says: str
) -> None:
    (tmp_path / "torch_npu.py").write_text(f"raise {raises}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(RunError, match=says) as failure:
        Npu()
    assert "\n" not in str(failure.value) and "asapctl doctor" in str(failure.value)


def test_no_visible_device_names_the_mask(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    double.npu.devices = 0
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "9")
    with pytest.raises(RunError, match="no NPU is visible with ASCEND_RT_VISIBLE_DEVICES=9"):
        Npu()


def test_a_driver_that_fails_is_quoted_in_a_line(
    double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("Initialize:torch_npu/..., error code is 507008\n[Error]: more")

    monkeypatch.setattr(double.npu, "init", fail)
    with pytest.raises(
        RunError, match=r"driver does not open the device: .*507008; check"
    ) as failure:
        Npu()
    assert "more" not in str(failure.value)


# --- only what torch-npu has -----------------------------------------------------------------


def chain(node: ast.expr) -> str | None:
    """`a.b` for the expression <anything>.torch_npu.a.b or torch_npu.a.b."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        if node.attr == "torch_npu":
            break
        parts.append(node.attr)
        node = node.value
    at_root = isinstance(node, ast.Attribute) or (
        isinstance(node, ast.Name) and node.id == "torch_npu"
    )
    return ".".join(reversed(parts)) if at_root and parts else None


def test_only_recorded_names_and_parameters_are_used() -> None:
    allowed: dict[str, Sequence[str]] = dict(PYTHON)
    for text in OPERATORS:
        schema = torch._C.parse_schema(text)
        allowed[schema.name] = [argument.name for argument in schema.arguments]
    allowed |= {HCCL: (), f"{HCCL}.Options": ()}
    called: set[str] = set()
    options: set[str] = set()
    for source in SOURCES:
        tree = ast.parse(Path(npu_module.__file__).with_name(source).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (path := chain(node.func)) is not None:
                called.add(path)
                assert path in allowed, path
                assert {keyword.arg for keyword in node.keywords} <= set(allowed[path]), path
            if isinstance(node, ast.Attribute) and (
                isinstance(node.value, ast.Name) and node.value.id in ("options", "event")
            ):
                options.add(f"{node.value.id}.{node.attr}")
    assert {*(schema.partition("(")[0] for schema in OPERATORS), f"{HCCL}.Options"} <= called
    known = {f"options.{name}" for name in HCCL_OPTIONS} | {f"event.{name}" for name in EVENT}
    assert options and options <= known


FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "another dtype of gamma": lambda npu: npu.npu_rms_norm(torch.ones(2, 4), torch.ones(4).half()),
    "one dimension": lambda npu: npu.npu_rms_norm(torch.ones(4), torch.ones(4)),
    "an unknown parameter": lambda npu: npu.npu_swiglu(torch.ones(2, 4), axis=-1),
    "a keyword by position": lambda npu: npu.npu_moe_gating_top_k(torch.ones(1, 8), 1, None),
    "three-dimensional x": lambda npu: npu.npu_rotary_mul(*[torch.ones(1, 2, 4)] * 3),
    "angles beyond 1": lambda npu: npu.npu_rotary_mul(*[2 * torch.ones(1, 2, 1, 4)] * 3),
    "unequal widths": lambda npu: npu.npu_fusion_attention(
        torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 4), 2, "BSND"
    ),
    "a small mask": lambda npu: npu.npu_fusion_attention(
        *[torch.ones(1, 2, 2, 8)] * 3,
        2,
        "BSND",
        atten_mask=torch.ones(2, 2).triu(1) > 0,
        sparse_mode=3,
    ),
    "more experts than there are": lambda npu: npu.npu_moe_gating_top_k_softmax(
        torch.ones(1, 4), k=5
    ),
    "two experts a group": lambda npu: npu.npu_moe_gating_top_k(
        torch.ones(1, 8), 1, group_count=4, norm_type=1
    ),
    "an int32 list": lambda npu: npu.npu_grouped_matmul(
        [torch.ones(2, 4)],
        [torch.ones(1, 4, 3)],
        group_list=torch.tensor([2]).int(),
        split_item=2,
        group_type=0,
    ),
    "a list that does not cover x": lambda npu: npu.npu_grouped_matmul(
        [torch.ones(2, 4)],
        [torch.ones(1, 4, 3)],
        group_list=torch.tensor([1]),
        split_item=2,
        group_type=0,
    ),
    "a list of one size": lambda npu: npu.npu_grouped_matmul(
        [torch.ones(2, 4)],
        [torch.ones(1, 4, 3)],
        group_list=torch.tensor([2]),
        split_item=2,
        group_type=0,
        group_list_type=1,
    ),
    "several outputs": lambda npu: npu.npu_grouped_matmul(
        [torch.ones(2, 4)], [torch.ones(1, 4, 3)], group_list=torch.tensor([2]), group_type=0
    ),
    "an event that was not recorded": lambda npu: npu.npu.Event().wait(),
}


@pytest.mark.parametrize("forbidden", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_the_stand_in_forbids(npu: Any, forbidden: Callable[[Any], Any]) -> None:
    with pytest.raises(ForbiddenError):
        forbidden(npu)


@pytest.mark.parametrize(
    "use",
    [
        lambda double: double.npu.Stream(),
        lambda double: double.npu.Event(),
        lambda double: double.npu_swiglu(torch.ones(2, 4)),
    ],
)
def test_the_stand_in_wants_its_device_set_first(double: Any, use: Callable[[Any], Any]) -> None:
    with pytest.raises(ForbiddenError, match="set_device"):
        use(double)


def test_the_records_are_those_of_an_installed_torch_npu() -> None:
    """Reads its files; they cannot be imported where there is no CANN."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        pytest.skip("torch-npu is not installed")
    root = Path(spec.origin).parent
    if f"'{VERSION}'" not in (root / "version.py").read_text():
        pytest.skip(f"torch-npu is not {VERSION}")
    registry = (root / "csrc/aten/npu_native_functions_by_codegen.yaml").read_text()
    for text in OPERATORS:
        assert f"func: {text}\n" in registry, text
    found: dict[str, tuple[str, ...]] = {}
    for source in ("__init__.py", "utils.py", "streams.py"):
        for node in ast.parse((root / "npu" / source).read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found[f"npu.{node.name}"] = tuple(argument.arg for argument in node.args.args)
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef):
                    name = f"npu.{node.name}.{method.name}"  # type: ignore[attr-defined]
                    found[name] = tuple(argument.arg for argument in method.args.args[1:])
    for name in ("Stream", "Event"):
        found[f"npu.{name}"] = found[f"npu.{name}.__new__"]
    assert {name: found[name] for name in PYTHON} == dict(PYTHON)
    assert {name: found[f"npu.Event.{name}"] for name in EVENT} == dict(EVENT)
