"""How the members of a tensor-parallel group share heads and tokens. Plain arithmetic."""

import msgspec


class Shard(msgspec.Struct, frozen=True):
    """Member `member` of a group of `size`."""

    member: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.member < self.size:
            raise ValueError(f"member {self.member} of {self.size}")


def most_rows(tokens: int, size: int) -> int:
    """Rows of the member that has the most of them."""
    return -(-tokens // size)


def member_rows(tokens: int, shard: Shard) -> slice:
    """The member's own rows of a batch: consecutive, `most_rows` of them; the last members have
    fewer, or none. Together the members have every row once, in order.
    """
    most = most_rows(tokens, shard.size)
    return slice(min(shard.member * most, tokens), min((shard.member + 1) * most, tokens))
