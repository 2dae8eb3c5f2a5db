"""torch-npu's operators in the model, on a stand-in, against the plain code and transformers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device import fused, npu_operators
from engine.model.architecture import Rope, Router
from engine.model.attention import Span
from engine.model.config import load_config
from engine.model.experts import ExpertModel
from engine.model.layers import RMSNorm
from engine.model.rope import Rotation, rotate, rotation
from engine.model.router import Gate
from engine.model.spans import attend
from helpers.checkpoints import (
    FAMILIES,
    checkpoint,
    reference_logits,
    tied_positions,
    token_ids,
)
from helpers.network import Network, Prompt
from helpers.torch_npu_double import torch_npu_double

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def npu() -> Iterator[Any]:
    """The stand-in, with its operators in use for CPU tensors."""
    double = torch_npu_double()
    double.npu.set_device(0)
    with fused.using(npu_operators.operators(double, triton=False)):
        yield double


def names(npu: Any) -> list[str]:
    return [name for name, _ in npu.calls]


def plainly(compute: Callable[[], Any]) -> Any:
    with fused.using(fused.FusedOperators()):
        return compute()


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (5, 3, 16), (0, 32)])
def test_rms_norm(npu: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    norm = RMSNorm(shape[-1], 1e-3).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.rand(shape[-1]) + 0.5)
    x = torch.randn(shape).to(dtype)
    assert_close(norm(x), plainly(lambda: norm(x)))
    assert names(npu) == ["npu_rms_norm"] * (x.numel() > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rotate(npu: Any, dtype: torch.dtype, interleaved: bool, tokens: int) -> None:
    torch.manual_seed(2)
    angles = torch.randn(tokens, 8)
    turn = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), unit=True)
    x = torch.randn(tokens, 3, 16).to(dtype)
    assert_close(rotate(x, turn, interleaved), plainly(lambda: rotate(x, turn, interleaved)))
    assert names(npu) == ["npu_rotary_mul"] * (tokens > 0)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_angles_beyond_the_documented_range_are_rotated_plainly(npu: Any, factor: float) -> None:
    turn = rotation(Rope(16, 10_000.0, attention_factor=factor), torch.arange(7), torch.float32)
    x = torch.randn(7, 3, 16)
    assert_close(rotate(x, turn, False), plainly(lambda: rotate(x, turn, False)))
    assert names(npu) == ["npu_rotary_mul"] * (factor == 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (9, 9), (4, 9), (1, 9)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"), [(4, 2, 16, 16), (2, 2, 24, 8)]
)
def test_attend(
    npu: Any,
    dtype: torch.dtype,
    window: int | None,
    rows: int,
    keys: int,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
) -> None:
    torch.manual_seed(3)
    query = torch.randn(rows, heads, width).to(dtype)
    key = torch.randn(keys, kv_heads, width).to(dtype)
    value = torch.randn(keys, kv_heads, value_width).to(dtype)

    def compute() -> Tensor:
        return attend(query, key, value, window, 0.3)

    assert_close(compute(), plainly(compute))
    assert names(npu) == ["npu_fusion_attention"]


def test_more_heads_than_the_operator_takes_are_attended_plainly(npu: Any) -> None:
    query = torch.randn(2, 257, 4)
    assert attend(query, query, query, None, 0.3).shape == query.shape
    assert names(npu) == []


ROUTERS = [
    (Router("softmax", 3, normalize=True), 8, "npu_moe_gating_top_k_softmax"),
    (Router("softmax", 1, normalize=False, scaling=2.0), 8, "npu_moe_gating_top_k_softmax"),
    (Router("sigmoid", 3, True, 2.5, groups=4, top_groups=2), 16, "npu_moe_gating_top_k"),
    (Router("sigmoid", 3, False, 2.5, groups=4, top_groups=2), 16, "npu_moe_gating_top_k"),
    (Router("sigmoid", 3, True, groups=4, top_groups=4), 8, "npu_moe_gating_top_k"),
    (Router("sigmoid", 8, True, 2.5, groups=8, top_groups=4), 256, "npu_moe_gating_top_k"),
    (Router("sigmoid", 3, True, groups=4, top_groups=2), 8, None),  # two experts a group
    (Router("sigmoid", 3, True, groups=65, top_groups=2), 65 * 4, None),  # 65 * 32 > 2048
]


@pytest.mark.parametrize(("router", "experts", "operator"), ROUTERS)
def test_gate(npu: Any, router: Router, experts: int, operator: str | None) -> None:
    torch.manual_seed(4)
    config = SimpleNamespace(router=router, experts=experts, hidden_size=12)
    gate = Gate(config).requires_grad_(False)  # type: ignore[arg-type]
    gate.weight.copy_(torch.randn(experts, 12))
    if router.kind == "sigmoid":
        gate.e_score_correction_bias.copy_(torch.randn(experts))
    x = torch.randn(20, 12)
    (found, weights), (expected, expected_weights) = gate(x), plainly(lambda: gate(x))
    assert found.dtype == torch.int64 and weights.dtype == torch.float32
    order, expected_order = found.argsort(-1), expected.argsort(-1)
    assert torch.equal(found.gather(1, order), expected.gather(1, expected_order))
    assert_close(weights.gather(1, order), expected_weights.gather(1, expected_order))
    assert names(npu) == ([] if operator is None else [operator])
    npu.calls.clear()
    assert gate(x[:0])[0].shape == (0, router.top_k) and names(npu) == []


def experts_of(local: int, dtype: torch.dtype) -> ExpertModel:
    torch.manual_seed(5)
    model = ExpertModel(load_config(checkpoint("qwen3_moe")), range(local)).to(dtype)
    for parameter in model.parameters():
        parameter.copy_(0.15 * torch.randn(parameter.shape))
    return model


COUNTS = {
    "some": [3, 0, 5, 1],
    "all to one": [0, 0, 9, 0],
    "none": [0, 0, 0, 0],
    "edges": [9, 0, 0, 9],
    "one expert": [4],
}


def served(model: ExpertModel, counts: Sequence[int], layer: Any, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(6)
    rows = 9
    index = torch.cat([torch.randperm(rows)[:count].sort().values for count in counts]).int()
    out = torch.full((rows, 32), 7.0).to(dtype)
    hidden = torch.randn(rows, 32).to(dtype)
    weights = torch.rand(len(index))
    model.serve(layer, hidden, torch.tensor(counts, dtype=torch.int32), index, weights, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [16_384, 4, 1])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_experts(
    npu: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, most: int, counts: list[int]
) -> None:
    monkeypatch.setattr(npu_operators, "_PAIRS", most)
    model = experts_of(len(counts), dtype)
    for layer in (0, 2):
        found = served(model, counts, layer, dtype)
        assert_close(found, plainly(partial(served, model, counts, layer, dtype)))
    assert torch.equal(found, served(model, counts, torch.tensor(2), dtype))
    products = names(npu).count("npu_grouped_matmul")
    assert products % 2 == 0 and (products > 0) == (sum(counts) > 0)
    assert names(npu).count("npu_swiglu") == products // 2


def test_products_hold_a_bounded_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_operators, "_PAIRS", 4)
    assert list(npu_operators._runs([1, 1, 9, 0, 3, 1, 2, 0])) == [(0, 3), (3, 6), (6, 8)]
    assert list(npu_operators._runs([0, 5, 0, 0])) == [(0, 2)]
    assert list(npu_operators._runs([0, 0])) == []


@torch.inference_mode()
@pytest.mark.parametrize("name", FAMILIES)
def test_whole_models_agree_with_transformers(npu: Any, name: str) -> None:
    network = Network(checkpoint(name), 2)
    prompts = [Prompt(network.attention, token_ids(length)) for length in (1, 33, 129)]
    first, second, third = prompts
    network.step([(first, Span(0, 1)), (second, Span(0, 33)), (third, Span(0, 60))])
    network.step([(third, Span(60, 69))])
    for prompt in prompts:
        expected = reference_logits(checkpoint(name), prompt.token_ids)
        tied = tied_positions(checkpoint(name), prompt.token_ids)
        kept = [i for i in range(len(expected)) if i not in tied]
        assert (torch.cat(prompt.logits) - expected)[kept].abs().max().item() <= 1e-5
    used = set(names(npu))
    assert {"npu_rms_norm", "npu_rotary_mul", "npu_fusion_attention"} <= used
    assert {"npu_grouped_matmul", "npu_swiglu"} <= used
    assert any(each.startswith("npu_moe_gating_top_k") for each in used)
