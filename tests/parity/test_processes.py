"""Every layout of processes gives what transformers gives: keys, values, log-probabilities."""

from pathlib import Path

import pytest

from helpers.checkpoints import FAMILIES
from helpers.instances import layout
from helpers.parity import BATCHING, ONE_OF_EACH, check_parity

LAYOUTS = ((1, 1), (2, 1), (1, 2), (3, 2), (1, 3))


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(("groups", "ranks"), LAYOUTS)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_layouts(name: str, groups: int, ranks: int, lanes: int, tmp_path: Path) -> None:
    check_parity(name, tmp_path, layout(groups, ranks, f"schedule.lanes={lanes}", *BATCHING))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ONE_OF_EACH])
def test_variants_of_the_families_in_tiles(name: str, tmp_path: Path) -> None:
    check_parity(name, tmp_path, layout(2, 3, "comm.window_tokens=48", *BATCHING))


# Uneven numbers of groups and expert ranks; windows whose rows the members cannot divide evenly.
TEAMS = ((2, 2, 3, "shm"), (2, 3, 2, "gloo"), (4, 2, 3, "gloo"))


@pytest.mark.parametrize(("size", "groups", "ranks", "transport"), TEAMS)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_heads_divided_over_the_ranks_of_a_group(
    name: str, size: int, groups: int, ranks: int, transport: str, tmp_path: Path
) -> None:
    more = (
        f"attention.tensor_parallel={size}",
        f"comm.transport={transport}",
        "comm.window_tokens=49",
    )
    check_parity(name, tmp_path, layout(groups, ranks, *more, *BATCHING))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_over_process_groups(name: str, tmp_path: Path) -> None:
    more = ("comm.transport=gloo", "comm.window_tokens=48", "schedule.lanes=3")
    check_parity(name, tmp_path, layout(3, 2, *more, *BATCHING))
