"""Groups in lockstep give what transformers gives, like any other layout."""

from pathlib import Path

import pytest

from helpers.checkpoints import FAMILIES
from helpers.instances import layout
from helpers.parity import BATCHING, ONE_OF_EACH, check_parity

# Odd numbers, so that some groups of a step have nothing to do; chunks that no prompt ends at.
LAYOUTS = (
    ("sync-afd", 3, 2, "shm"),
    ("sync-afd", 2, 3, "gloo"),
    ("sync", 3, 3, "shm"),
    ("sync", 1, 1, "shm"),
    ("sync-chunked", 3, 3, "shm"),
    ("sync-chunked", 2, 2, "gloo"),
)


@pytest.mark.parametrize(("policy", "groups", "ranks", "transport"), LAYOUTS)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_policies(
    name: str, policy: str, groups: int, ranks: int, transport: str, tmp_path: Path
) -> None:
    more = (
        f"schedule.policy={policy}",
        f"comm.transport={transport}",
        "schedule.chunk_tokens=99",
        "comm.window_tokens=48",
    )
    check_parity(name, tmp_path, layout(groups, ranks, *more, *BATCHING))


@pytest.mark.parametrize("policy", ["sync", "sync-chunked", "sync-afd"])
def test_with_heads_divided(policy: str, tmp_path: Path) -> None:
    more = (
        f"schedule.policy={policy}",
        "attention.tensor_parallel=2",
        "schedule.chunk_tokens=99",
        "comm.window_tokens=49",
    )
    check_parity("qwen3_moe", tmp_path, layout(2, 4, *more, *BATCHING))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ONE_OF_EACH])
def test_variants_of_the_families_in_chunks(name: str, tmp_path: Path) -> None:
    more = ("schedule.policy=sync-chunked", "schedule.chunk_tokens=70")
    check_parity(name, tmp_path, layout(2, 2, *more, *BATCHING))
