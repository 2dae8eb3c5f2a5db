"""What a self-test compares: messages that both ends predict, and operators that are wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.comm.layout import WindowShape
from engine.device.fused import FusedOperators, using
from engine.model.config import load_config
from engine.model.sharding import problems
from engine.selftest import operators
from engine.selftest.checkpoint import write_small_checkpoint
from engine.selftest.operators import OPERATORS, try_operators
from engine.selftest.traffic import Traffic

CPU = torch.device("cpu")
SHAPE = WindowShape(rows=50, hidden=8, top_k=2, local_experts=5, payload_bytes=2, lanes=3)


def traffic(dtype: torch.dtype = torch.bfloat16) -> Traffic:
    return Traffic(SHAPE, 3, 4, dtype, CPU)


def test_messages_are_the_same_at_both_ends_and_cover_the_window() -> None:
    here, there = traffic(), traffic()
    sizes = set()
    for number in range(300):
        one, other = here.part(7, number), there.part(7, number)
        assert here.place(2, number) == there.place(2, number)
        assert torch.equal(here.source(7, number), there.source(7, number))
        for name in ("rows", "counts", "row_index", "weights"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert one.p <= SHAPE.pairs
        assert len(one.rows.unique()) == one.n <= SHAPE.rows
        assert int(one.counts.sum()) == one.p
        assert not one.n or 0 <= int(one.rows.min()) <= int(one.rows.max()) < SHAPE.rows
        pairs = zip(
            torch.arange(5).repeat_interleave(one.counts).tolist(),
            one.row_index.tolist(),
            strict=True,
        )
        assert len(set(pairs)) == one.p  # a row goes to an expert once
        sizes.add(one.n)
    assert {0, 1, SHAPE.rows} < sizes
    assert len(sizes) > 10
    assert {here.place(2, number).lane for number in range(50)} == {0, 1, 2}


def test_answers_are_exact_in_every_dtype() -> None:
    for number in range(100):
        exact = traffic(torch.float32)
        part = exact.part(0, number)
        hidden = exact.source(0, number)[part.rows]
        answer = exact.answer(3, hidden, part)
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(answer.to(dtype).float(), answer)
            assert torch.equal(hidden.to(dtype).float(), hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_plain_code_is_good(dtype: torch.dtype) -> None:
    results = try_operators(CPU, dtype)
    assert [result.operator for result in results] == list(OPERATORS)
    assert all(result.good and not result.fused for result in results), results


def _wrong_gate(logits: torch.Tensor, router: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = logits.softmax(-1).topk(router.top_k)
    return experts, weights  # neither normalised nor, for sigmoid, the right ones


def _no_sum(*arguments: torch.Tensor) -> None:
    arguments[-1].zero_()


def _no_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: Any, scale: float
) -> torch.Tensor | None:
    from engine.model.spans import attend

    with using(FusedOperators()):
        return attend(query, key, value, None, scale)


WRONG: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps: x * weight,
    "rotate": lambda x, cos, sin, interleaved: x,
    "attend": _no_window,
    "gate": _wrong_gate,
    "experts": _no_sum,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrong_operator_is_noticed(name: str) -> None:
    with using(FusedOperators(**{name: WRONG[name]})):
        results = {result.operator: result for result in try_operators(CPU, torch.bfloat16)}
    assert not results[name].good
    assert results[name].fused
    assert all(result.good for other, result in results.items() if other != name)


def test_an_operator_that_fails_is_told_of() -> None:
    def broken(*arguments: object) -> torch.Tensor:
        raise RuntimeError("no such kernel\nand more")

    def hollow(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        return x * float("nan")

    with using(FusedOperators(rms_norm=broken, rotate=hollow)):
        norm, rotate, *_ = try_operators(CPU, torch.float32)
    assert norm.problem == "RuntimeError: no such kernel"
    assert rotate.problem == "gave what is not finite"
    assert not norm.good
    assert not rotate.good


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", OPERATORS["gate"])
def test_no_choice_of_experts_hangs_on_a_rounding(
    case: operators.Operator, dtype: torch.dtype
) -> None:
    """Else a device that rounds in its own way would be called wrong."""
    noise = torch.Generator().manual_seed(1)
    side = operators._Side(CPU, torch.float32)
    exact = case(side, operators._generator(), dtype)

    def near(logits: torch.Tensor, router: Any, bias: Any) -> None:
        logits += 1e-5 * torch.randn(logits.shape, generator=noise)

    with using(FusedOperators(gate=near)):  # it returns None, and the plain code goes on
        for _ in range(20):
            moved = case(side, operators._generator(), dtype)
            assert torch.equal(moved > 0, exact > 0)


@pytest.mark.parametrize(("ranks", "members"), [(1, 1), (3, 2), (9, 3), (16, 4), (5, 5), (2, 64)])
def test_the_small_checkpoint_can_be_divided(tmp_path: Any, ranks: int, members: int) -> None:
    write_small_checkpoint(tmp_path, ranks, members)
    config = load_config(tmp_path)
    assert config.experts >= ranks
    assert problems(config, members) == []
