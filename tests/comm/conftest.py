from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.pairs import Pairs


@pytest.fixture
def make_windows(tmp_path: Path) -> Iterator[Callable[..., Pairs]]:
    """As make_pairs, over shared memory: for what looks into it, or rings without a payload."""
    yield from _closing(tmp_path, "shm")


@pytest.fixture(params=["shm", "gloo", "hccl"])
def make_pairs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Pairs]]:
    """Makes Pairs (same arguments, without the folder) that are closed after the test.

    Every transport has to do what the tests ask for; "hccl" is a stand-in that keeps its rules.
    """
    yield from _closing(tmp_path, request.param)


@pytest.fixture(params=["shm", "gloo"])
def make_recovering(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Pairs]]:
    """As make_pairs, of transports over which some ranks may come later, or again."""
    yield from _closing(tmp_path, request.param)


def _closing(folder: Path, transport: str) -> Iterator[Callable[..., Pairs]]:
    made: list[Pairs] = []

    def make(**sizes: Any) -> Pairs:
        made.append(Pairs(folder, transport=transport, **sizes))
        return made[-1]

    yield make
    for pairs in made:
        pairs.close()
