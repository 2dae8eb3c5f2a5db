"""What the members of an attention group exchange, over gloo."""

import pytest
import torch
from torch import Tensor

from engine.comm.collectives import TensorParallel
from engine.errors import RunError
from engine.topology.shard import Shard, member_rows, most_rows
from helpers.teams import in_team

SIZES = [1, 2, 3, 4]
TOKENS = [0, 1, 2, 3, 4, 5, 7, 64]


def seeded(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", range(1, 9))
def test_every_row_has_one_owner(size: int) -> None:
    for tokens in range(40):
        slices = [member_rows(tokens, Shard(member, size)) for member in range(size)]
        assert [row for part in slices for row in range(tokens)[part]] == list(range(tokens))
        sizes = [part.stop - part.start for part in slices]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) == sizes[0] == most_rows(tokens, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_gathered_in_order(size: int, dtype: torch.dtype) -> None:
    batches = [(100 * seeded(n, n, 3)).to(dtype) for n in TOKENS]
    batches += [seeded(9, 5), seeded(9, 5, 2, 3)]

    def work(team: TensorParallel) -> list[Tensor]:
        own = [whole[team.rows(len(whole))] for whole in batches]
        return [team.gather(part, len(w)) for part, w in zip(own, batches, strict=True)]

    for found in in_team(size, work):
        assert all(torch.equal(mine, whole) for mine, whole in zip(found, batches, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_partial_outputs_are_added_in_float32_in_the_members_order(
    size: int, dtype: torch.dtype
) -> None:
    partials = [[seeded(100 * m + n, n, 5, dtype=dtype) for n in TOKENS] for m in range(size)]

    def work(team: TensorParallel) -> list[Tensor]:
        mine = partials[team.member]
        # Whether the rows lie next to each other must not matter.
        mine = [*mine[:-1], mine[-1].T.contiguous().T]
        return [team.scatter_sum(partial) for partial in mine]

    found = in_team(size, work)
    for index, tokens in enumerate(TOKENS):
        total = torch.zeros(tokens, 5)
        for partial in partials:
            total = total + partial[index].float()
        for member in range(size):
            rows = found[member][index]
            assert rows.dtype == dtype
            assert torch.equal(rows, total.to(dtype)[member_rows(tokens, Shard(member, size))])


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 3), (2, 2), (2, 4), (4, 2), (4, 1), (3, 3)])
def test_heads_are_gathered_and_shared_ones_taken_once(size: int, kv_heads: int) -> None:
    whole = seeded(1, 6, kv_heads, 4)
    local = max(1, kv_heads // size)

    def work(team: TensorParallel) -> Tensor:
        first = team.member * kv_heads // size
        return team.gather_heads(whole[:, first : first + local], kv_heads)

    assert all(torch.equal(found, whole) for found in in_team(size, work))


def test_one_alone_copies_nothing() -> None:
    rows = seeded(1, 4, 2)
    team = TensorParallel.solo()
    assert (team.member, team.size) == (0, 1)
    assert team.gather(rows, 4) is rows
    assert team.scatter_sum(rows) is rows
    assert team.gather_heads(rows, 2) is rows


def test_groups_that_cannot_be_are_refused() -> None:
    for arguments in ((None, 0, 2), (object(), 0, 1), (object(), 2, 2), (object(), -1, 2)):
        with pytest.raises(ValueError, match=r"of [12]"):
            TensorParallel(*arguments)


def test_other_rows_than_the_own_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows of 8 tokens"):
        in_team(2, lambda team: team.gather(torch.zeros(3, 2), 8))
    with pytest.raises(ValueError, match="3 rows of 4 tokens"):
        TensorParallel.solo().gather(torch.zeros(3, 2), 4)


@pytest.mark.parametrize("method", ["gather", "scatter_sum", "gather_heads"])
def test_a_missing_member_is_an_error_and_no_hang(method: str) -> None:
    def work(team: TensorParallel) -> None:
        if team.member == 1:
            return
        arguments = {
            "gather": (torch.zeros(2, 3), 4),
            "scatter_sum": (torch.zeros(4, 3),),
            "gather_heads": (torch.zeros(4, 1, 3), 2),
        }
        with pytest.raises(RunError, match="another rank of the attention group"):
            getattr(team, method)(*arguments[method])

    in_team(2, work, timeout_s=5)
