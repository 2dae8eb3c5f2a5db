from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.pairs import Pairs


@pytest.fixture
def make_pairs(tmp_path: Path) -> Iterator[Callable[..., Pairs]]:
    """Makes Pairs (same arguments, without the folder) that are closed after the test."""
    made: list[Pairs] = []

    def make(**sizes: Any) -> Pairs:
        made.append(Pairs(tmp_path, **sizes))
        return made[-1]

    yield make
    for pairs in made:
        pairs.close()
