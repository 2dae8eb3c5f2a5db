"""Groups in lockstep give what transformers gives, like any other layout."""

from pathlib import Path

import pytest

from helpers.instances import layout
from helpers.parity import BATCHING, check_parity

# Every policy meets grouped heads, latent attention and heads that are divided, and every family is
# here; the chunks of each are compared in one process, too. Odd numbers, so that some groups of a
# step have nothing to do; chunks that no prompt ends at.
CASES = (
    ("sync-afd", 3, 2, 1, "shm", "qwen3_moe_tied"),
    ("sync-afd", 2, 3, 1, "gloo", "deepseek_v3"),
    ("sync-afd", 2, 4, 2, "shm", "mixtral"),
    ("sync", 3, 3, 1, "shm", "deepseek_v3_plain"),
    ("sync", 1, 1, 1, "shm", "mixtral_window"),
    ("sync", 2, 4, 2, "shm", "qwen3_moe"),
    ("sync-chunked", 3, 3, 1, "shm", "deepseek_v3"),
    ("sync-chunked", 2, 4, 2, "gloo", "qwen3_moe_window"),
)


@pytest.mark.parametrize(("policy", "groups", "ranks", "size", "transport", "name"), CASES)
def test_policies(
    policy: str, groups: int, ranks: int, size: int, transport: str, name: str, tmp_path: Path
) -> None:
    more = (
        f"schedule.policy={policy}",
        f"attention.tensor_parallel={size}",
        f"comm.transport={transport}",
        "schedule.chunk_tokens=99",
        f"comm.window_tokens={47 + size}",  # which the members of a group cannot divide evenly
    )
    check_parity(name, tmp_path, layout(groups, ranks, *more, *BATCHING))
