"""Who the ranks are. The plain types that every other part names a rank with."""

from typing import Literal, TypeAlias

import msgspec

Role: TypeAlias = Literal["attention", "expert"]


class RankId(msgspec.Struct, frozen=True, order=True):
    """A rank and which life of it: a respawned rank has the next incarnation."""

    role: Role
    rank: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"
