"""Where every byte of a window lies. Pure arithmetic: whoever reads it needs no torch.

One window connects one attention rank with one expert rank. It has a region for each lane, and a
region holds five arrays, each from a 64-byte boundary (a cache line), in this order:

    hidden     [rows, hidden]  payload   attention -> expert
    counts     [local_experts] int32     attention -> expert
    row_index  [pairs]         int32     attention -> expert
    weights    [pairs]         float32   attention -> expert
    out        [rows, hidden]  payload   expert -> attention

Where ranks share no memory, the first four travel as one message with only as many rows and pairs
as there are (`WindowShape.message`), and so do the rows of the answer.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

ALIGNMENT = 64
_INT32 = 4
_FLOAT32 = 4


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Message(NamedTuple):
    """Where a dispatch's arrays begin in its message, and its whole size. In bytes."""

    counts_at: int
    row_index_at: int
    weights_at: int
    total: int


class WindowShape(msgspec.Struct, frozen=True):
    """The sizes that both ends of a window agree on.

    rows: most tokens in one dispatch. hidden: elements in a row. top_k: experts of a token.
    local_experts: experts of this expert rank. payload_bytes: bytes of one element of a row.
    Offsets are in bytes: `*_at` from the start of a lane's region, `lane_at` from the window's.
    """

    rows: int
    hidden: int
    top_k: int
    local_experts: int
    payload_bytes: int
    lanes: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            least = 0 if name == "local_experts" else 1
            if getattr(self, name) < least:
                raise ValueError(f"window {name} is {getattr(self, name)}, less than {least}")

    @property
    def pairs(self) -> int:
        """Most (token, expert) pairs in one dispatch: a token chooses distinct experts."""
        return self.rows * min(self.top_k, self.local_experts)

    @property
    def rows_bytes(self) -> int:
        """Size of `hidden`, and of `out`."""
        return self.rows * self.hidden * self.payload_bytes

    @property
    def hidden_at(self) -> int:
        return 0

    @property
    def counts_at(self) -> int:
        return _aligned(self.rows_bytes)

    @property
    def row_index_at(self) -> int:
        return self.counts_at + _aligned(self.local_experts * _INT32)

    @property
    def weights_at(self) -> int:
        return self.row_index_at + _aligned(self.pairs * _INT32)

    @property
    def out_at(self) -> int:
        return self.weights_at + _aligned(self.pairs * _FLOAT32)

    @property
    def lane_bytes(self) -> int:
        return self.out_at + _aligned(self.rows_bytes)

    def message(self, n: int, p: int) -> Message:
        """Of a dispatch of `n` rows and `p` pairs; the rows come first."""
        counts_at = _aligned(n * self.hidden * self.payload_bytes)
        row_index_at = counts_at + _aligned(self.local_experts * _INT32)
        weights_at = row_index_at + _aligned(p * _INT32)
        return Message(counts_at, row_index_at, weights_at, weights_at + _aligned(p * _FLOAT32))

    def lane_at(self, lane: int) -> int:
        return lane * self.lane_bytes

    @property
    def total_bytes(self) -> int:
        return self.lanes * self.lane_bytes


def tiles(tokens: int, rows: int) -> Iterator[slice]:
    """Cuts a batch of `tokens` into consecutive slices of at most `rows`: one dispatch each."""
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))
