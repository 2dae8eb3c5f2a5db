"""The expert kernels in Triton's interpreter, against the plain code of engine.model.

The interpreter rounds to bfloat16 by cutting off, which a device does not do: its tolerance is one
step of that type's 8 bits for each of the three roundings, others' are a device's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from engine.device import grouped_mlp
from engine.device.fused import ExpertTables, FusedOperators, using
from engine.model.experts import ExpertModel
from helpers.interpreted import compiled, interpreted

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[ModuleType]:
    with interpreted() as module:
        yield module


@dataclass(frozen=True)
class Config:
    """What an ExpertModel reads of a model's."""

    hidden_size: int
    expert_intermediate: int
    moe_layers: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    model: ExpertModel
    hidden: Tensor
    counts: Tensor
    row_index: Tensor
    weights: Tensor

    def serve(self, layer: int | Tensor) -> Tensor:
        out = torch.full_like(self.hidden, float("nan"))
        grouped_mlp.serve(
            self.model.tables, layer, self.hidden, self.counts, self.row_index, self.weights, out
        )
        return out

    def expected(self, layer: int) -> Tensor:
        out = torch.empty_like(self.hidden)
        used = int(self.counts.sum())
        self.model.serve(
            layer,
            self.hidden,
            self.counts,
            self.row_index[:used],
            self.weights[:used],
            out,
        )
        return out


def case(
    rows_of: Sequence[Sequence[int]],
    n: int,
    hidden: int = 32,
    intermediate: int = 16,
    layers: tuple[int, ...] = (0,),
    dtype: torch.dtype = torch.float32,
    unused: int = 0,
) -> Case:
    """rows_of: the rows that go to each local expert. unused: pairs beyond the last that count."""
    torch.manual_seed(0)
    model = ExpertModel(Config(hidden, intermediate, layers), range(len(rows_of)))  # type: ignore[arg-type]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.to(dtype)
    row_index = torch.tensor([row for rows in rows_of for row in rows], dtype=torch.int32)
    beyond = torch.full((unused,), 10**9, dtype=torch.int32)
    return Case(
        model,
        torch.randn(n, hidden).to(dtype),
        torch.tensor([len(rows) for rows in rows_of], dtype=torch.int32),
        torch.cat([row_index, beyond]),
        torch.cat([torch.rand(len(row_index)) + 0.1, torch.full((unused,), float("nan"))]),
    )


def check(made: Case, layer: int = 0, given: int | Tensor | None = None) -> None:
    dtype = made.hidden.dtype
    torch.testing.assert_close(
        made.serve(layer if given is None else given),
        made.expected(layer),
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "rows_of",
    [
        pytest.param([[0, 2], [1, 2, 4], [0]], id="some for each"),
        pytest.param([[], [3, 1], [], [1]], id="experts without tokens"),
        pytest.param([[], [], list(range(5))], id="all to one"),
        pytest.param([[4]], id="one pair"),
        pytest.param([[], []], id="none"),
    ],
)
def test_same_as_the_plain_experts(rows_of: list[list[int]], dtype: torch.dtype) -> None:
    check(case(rows_of, n=5, dtype=dtype))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_sizes_that_fill_no_block(dtype: torch.dtype) -> None:
    """More rows, columns and depth than a block has, and not a multiple of it."""
    n = 37
    check(case([range(n), range(1, n, 2)], n, hidden=131, intermediate=67, dtype=dtype))


def test_tiles_are_as_high_as_an_experts_share() -> None:
    """Each height of a tile, with an expert that has more than its share."""
    assert [grouped_mlp._height(pairs, 4) for pairs in (1, 64, 65, 200, 10**6)] == [
        16,
        16,
        32,
        64,
        128,
    ]
    n = 140
    check(case([range(n)], n, hidden=16))
    check(case([range(n), range(30), []], n, hidden=16))


def test_no_tokens_at_all() -> None:
    assert case([[], []], n=0).serve(0).shape == (0, 32)


def test_a_row_without_a_pair_becomes_zero() -> None:
    assert not case([[0], [0]], n=3).serve(0)[1:].any()


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_the_layer_is_read_when_the_kernels_run(index_type: torch.dtype) -> None:
    """Layers without experts lie between; one tensor, rewritten, is all that changes."""
    made = case([[0, 1], [1, 2]], n=3, layers=(1, 2, 5))
    layer = torch.zeros(1, dtype=index_type)
    results = []
    for number in (5, 1, 2):
        layer.fill_(number)
        check(made, number, given=layer)
        check(made, number)
        results.append(made.serve(layer))
    assert not torch.equal(results[0], results[1])


def test_pairs_beyond_those_that_count_are_not_looked_at() -> None:
    """The host knows an upper bound only: what lies behind is neither an index nor a weight."""
    check(case([[0, 2], [2]], n=3, unused=30))


def test_launches_depend_on_upper_bounds_only(
    monkeypatch: pytest.MonkeyPatch, kernels: ModuleType
) -> None:
    """Same shapes, other layers and other counts: the same grids and the same scalars."""
    launches: list[object] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*arguments: object, **options: object) -> None:
                plain = [x for x in arguments if not isinstance(x, Tensor)]
                launches.append((self.name, grid, plain, options))

            return launch

    for name in ("plan", "gate_up", "down", "combine"):
        monkeypatch.setattr(kernels, name, Recorder(name))
    seen = []
    for rows_of, layer in (([[0, 1, 2], []], 0), ([[1], [0, 2]], 3)):
        launches.clear()
        case(rows_of, n=3, layers=(0, 3)).serve(layer)
        seen.append(list(launches))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 4


def test_a_number_that_is_no_moe_layer() -> None:
    with pytest.raises(KeyError, match="layer 1 has no experts"):
        case([[0]], n=1, layers=(0, 2)).serve(1)


def test_an_expert_rank_takes_them_where_its_device_has_them() -> None:
    made = case([[0], [0, 1]], n=2)
    plain, fused = made.expected(0), torch.empty_like(made.hidden)
    calls = []

    def experts(*arguments: Any) -> None:
        calls.append(arguments)
        grouped_mlp.serve(*arguments)

    with using(FusedOperators(experts=experts)):
        made.model.serve(0, made.hidden, made.counts, made.row_index, made.weights, fused)
    assert len(calls) == 1
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_the_same_bits_each_time() -> None:
    made = case([range(20), range(5, 20), range(0, 20, 3)], n=20, dtype=torch.float16)
    assert torch.equal(made.serve(0), made.serve(0))


def test_rows_with_a_stride_and_fewer_programs_than_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mlp, "_MOST_PROGRAMS", 2)
    made = case([range(18), range(9, 18)], n=18, hidden=70)
    wide = torch.zeros(18, 80)
    wide[:, :70] = made.hidden
    out = torch.full((18, 90), 7.0)
    grouped_mlp.serve(
        made.model.tables, 0, wide[:, :70], made.counts, made.row_index, made.weights, out[:, :70]
    )
    torch.testing.assert_close(out[:, :70], made.expected(0), rtol=1e-5, atol=1e-5)
    assert (out[:, 70:] == 7.0).all()


def test_preparing_computes_nothing_and_takes_any_tables() -> None:
    grouped_mlp.prepare(case([[0], []], n=1, layers=(2, 4)).model.tables)
    grouped_mlp.prepare(ExpertTables((), [], []))


def test_available_only_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    assert grouped_mlp.available()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert not grouped_mlp.available()


def test_the_workspace_is_what_serve_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of all tokens at one expert: memory is bounded by what the budget was told."""
    made = case([range(40), []], n=40, dtype=torch.float16)
    expected = grouped_mlp.workspace_bytes(40, 40, 2, hidden=32, intermediate=16, dtype_bytes=2)
    taken = []
    for name in ("empty", "full"):
        original = getattr(torch, name)

        def counted(*args: object, original: object = original, **kwargs: object) -> Tensor:
            made = original(*args, **kwargs)  # type: ignore[operator]
            taken.append(made.nbytes)
            return made  # type: ignore[no-any-return]

        monkeypatch.setattr(torch, name, counted)
    grouped_mlp.serve(
        made.model.tables,
        torch.zeros(1, dtype=torch.int32),
        made.hidden,
        made.counts,
        made.row_index,
        made.weights,
        torch.empty_like(made.hidden),
    )
    rows = 40 * (32 + 16) * 2  # new_empty's
    assert expected - 3 * 4 * 40 <= rows + sum(taken) <= expected


@pytest.mark.parametrize("height", [16, 128])
@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_machine_code_for_a_gpu(tmp_path: Path, kind: str, dtype: torch.dtype, height: int) -> None:
    """Compiled here for an accelerator that is not here. What it needs of shared memory is there
    on every GPU since Ampere: 99 KiB on the smallest.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = {
        **dict.fromkeys(("counts", "row_index", "tiles", "slots", "layer"), "*i32"),
        **dict.fromkeys(("hidden", "middle", "parts", "out"), f"*{kind}"),
        "addresses": "*i64",
        "weights": "*fp32",
    }
    aligned = ("hidden", "hidden_stride", "middle", "parts", "out", "width", "inner")
    blocks = grouped_mlp._blocks(height, torch.empty(0, dtype=dtype))
    constants = {"BLOCK_M": blocks.m, "BLOCK_K": blocks.k, "BLOCK_E": 16, "WIDEN": False}
    with compiled(tmp_path) as kernels:
        for name in ("plan", "gate_up", "down", "combine"):
            kernel = getattr(kernels, name)
            columns = 1024 if name == "combine" else blocks.n
            given = {**constants, "BLOCK_N": columns}
            signature = {
                argument: "constexpr" if argument.isupper() else types.get(argument, "i32")
                for argument in kernel.arg_names
            }
            at = {argument: (place,) for place, argument in enumerate(kernel.arg_names)}
            source = ASTSource(
                kernel,
                signature,
                {at[argument]: given[argument] for argument in at if argument.isupper()},
                {at[argument]: [["tt.divisibility", 16]] for argument in at if argument in aligned},
            )
            made = compile(
                source, target=GPUTarget("cuda", 90, 32), options={"num_warps": blocks.warps}
            )
            assert made.asm["cubin"]
            assert made.metadata.shared <= 99 * 1024
            if name in ("gate_up", "down") and dtype == torch.bfloat16:
                assert "mma" in made.asm["ptx"], "no tensor cores"
                assert "ld.global.b16" not in made.asm["ptx"], "weights loaded one by one"
