"""The compiled kernels for CPUs, beside plain code."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.device import fused
from engine.device.base import open_device
from engine.kernels import build
from engine.kernels.operators import CpuKernels
from engine.model import layers, spans
from engine.model.layers import RMSNorm
from engine.model.rope import Rotation, rotate

needs_compiler = pytest.mark.skipif(
    build.find_compiler(os.environ) is None, reason="there is no C++ compiler"
)


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    library = build.library()
    assert library is not None
    return CpuKernels(library)


@pytest.fixture
def in_use(kernels: CpuKernels) -> Iterator[None]:
    with fused.using(kernels.operators), torch.inference_mode():
        yield


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("window", [None, 1, 7, 300])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (7, 7), (5, 300), (257, 257), (300, 777)])
@pytest.mark.parametrize("shape", [(4, 2, 64, 64), (3, 3, 24, 16), (8, 1, 8, 72), (6, 2, 5, 3)])
def test_attention(
    rows: int, keys: int, window: int | None, shape: tuple[int, int, int, int], in_use: None
) -> None:
    heads, kv_heads, width, value_width = shape
    torch.manual_seed(rows * keys + heads)
    query, key = torch.randn(rows, heads, width), torch.randn(keys, kv_heads, width)
    both = torch.randn(keys, kv_heads, width + value_width)
    value = both[..., width:]  # heads that do not lie next to each other
    found = spans.attend(query, key, value, window, 0.3)
    with fused.using(fused.FusedOperators()):
        expected = spans.attend(query.double(), key.double(), value.double(), window, 0.3)
    close(found, expected)


@needs_compiler
def test_attention_of_extreme_scores_and_long_prompts(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score far above the others, at the end, and scores that all are far below zero."""
    monkeypatch.setattr("engine.kernels.operators._QUERIES", 100)
    torch.manual_seed(3)
    query, key, value = torch.randn(600, 2, 16), torch.randn(600, 1, 16), torch.randn(600, 1, 16)
    key[-1] *= 300
    query[50:60] = -100 * key[40]
    found = kernels.attend(query, key, value, None, 1.0)
    assert found is not None
    with fused.using(fused.FusedOperators()):
        expected = spans.attend(query.double(), key.double(), value.double(), None, 1.0)
    close(found, expected)


@needs_compiler
@pytest.mark.parametrize("shape", [(5, 32), (5, 3, 16), (2, 7), (0, 32), (3, 1000)])
def test_rms_norm(shape: tuple[int, ...], in_use: None) -> None:
    torch.manual_seed(1)
    norm = RMSNorm(shape[-1], 1e-3).requires_grad_(False)
    norm.weight.copy_(torch.rand(shape[-1]) + 0.5)
    x = torch.randn(*shape[:-1], shape[-1] + 3)[..., 1:-2]
    found = norm(x)
    with fused.using(fused.FusedOperators()):
        close(found, norm(x))


@needs_compiler
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rotate(tokens: int, interleaved: bool, in_use: None) -> None:
    torch.manual_seed(2)
    angles = torch.randn(tokens, 10)
    turn = Rotation(angles.cos(), angles.sin(), unit=True)
    x = torch.randn(tokens, 3, 24)[..., 2:22]
    found = rotate(x, turn, interleaved)
    with fused.using(fused.FusedOperators()):
        close(found, rotate(x, turn, interleaved))


@needs_compiler
@pytest.mark.parametrize("width", [1, 16, 77])
def test_gated(width: int, in_use: None) -> None:
    torch.manual_seed(4)
    both = 30 * torch.randn(9, 2 * width)
    both[0, 0], both[1, 0] = -500.0, 500.0
    found = layers.gated(both)
    with fused.using(fused.FusedOperators()):
        close(found, layers.gated(both))


@needs_compiler
def test_add_rows(kernels: CpuKernels) -> None:
    torch.manual_seed(5)
    out, x, weights = torch.randn(6, 33), torch.randn(4, 33), torch.rand(4)
    places = torch.tensor([5, 0, 2, 3], dtype=torch.int32)
    expected = out.index_add(0, places, x * weights[:, None])
    assert kernels.add_rows(out, places, weights, x)
    close(out, expected)
    assert not kernels.add_rows(out.double(), places, weights, x.double())


@needs_compiler
def test_other_types_are_left_to_plain_code(kernels: CpuKernels) -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    assert kernels.attend(x, x, x, None, 1.0) is None
    assert kernels.rms_norm(x, torch.ones(8), 1e-6) is None
    assert kernels.rotate(x, torch.ones(3, 4), torch.ones(3, 4), False) is None
    assert kernels.gated(torch.ones(2, 4, dtype=torch.bfloat16)) is None


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield tmp_path / "cache" / "asapctl"
    build.library.cache_clear()


@needs_compiler
def test_they_are_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library() is not None
    (made,) = fresh.iterdir()
    build.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build.library() is not None
    assert list(fresh.iterdir()) == [made]


def test_without_a_compiler_torch_does_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level("INFO"):
        assert build.library() is None
    assert "no C++ compiler" in caplog.text
    registered = dict(fused._registered)
    open_device("cpu")
    assert fused._registered == registered
    assert not fresh.exists()


@pytest.mark.parametrize("body", ["echo 'no such option' >&2; exit 3", "exit 0"])
def test_a_compiler_that_fails_is_told_of(
    body: str,
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\n{body}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert build.library() is None
    assert "kernels are not compiled: " in caplog.text
    assert list(fresh.iterdir()) == []
