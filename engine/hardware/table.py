"""The cost table of some hardware, in seconds per layer."""

from collections.abc import Iterable
from typing import Annotated, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=3600.0)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]


class Segment(Protocol):
    """`length` consecutive tokens of one prompt, from position `start`."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the tables."""


TableT = TypeVar("TableT", bound=Table)


class Link(Table, frozen=True):
    """What it takes until `tokens` tokens have arrived at the other side."""

    base_s: Seconds
    token_s: Seconds

    def seconds(self, tokens: float) -> float:
        return self.base_s + self.token_s * tokens if tokens else 0.0


class AttentionCost(Table, frozen=True):
    """Of one attention group. pair_s counts length x length pairs of a whole prompt."""

    base_s: Seconds
    token_s: Seconds
    pair_s: Seconds


class ExpertCost(Table, frozen=True):
    """Of one of `ranks` expert ranks, for a work item of so many tokens of the model: flat_s up to
    inflection_tokens, and token_s for each one beyond. bubble_s: what the host adds to each item.
    """

    ranks: Count
    flat_s: Seconds
    inflection_tokens: Count
    token_s: Seconds
    bubble_s: Seconds


class Links(Table, frozen=True):
    """dispatch: from attention to experts. combine: back."""

    dispatch: Link
    combine: Link


class Hardware(Table, frozen=True):
    """Costs of one layer. about: where the figures are from. layers: of the model that they are of.

    links: between ranks that do not wait for each other; sync_links: where a layer is a barrier.
    """

    about: Annotated[str, Meta(min_length=1)]
    layers: Count
    attention: AttentionCost
    experts: ExpertCost
    links: Links
    sync_links: Links

    def attention_s(self, segments: Iterable[Segment]) -> float:
        """One layer of attention over a batch on one group; 0 without tokens.

        A segment's tokens see each other and what was before them: length * (2 * start + length)
        pairs, so that chunks of a prompt add up to the whole.
        """
        cost, tokens, pairs = self.attention, 0, 0
        for segment in segments:
            tokens += segment.length
            pairs += segment.length * (2 * segment.start + segment.length)
        return cost.base_s + cost.token_s * tokens + cost.pair_s * pairs if tokens else 0.0

    def experts_s(self, tokens: float, ranks: int | None = None) -> float:
        """One work item of `tokens` tokens that choose experts evenly, on each of `ranks` expert
        ranks (by default as many as the table is of); 0 without tokens.

        With twice the ranks each has half of the experts and of the work, so half the time.
        """
        cost = self.experts
        if not tokens:
            return 0.0
        beyond = max(0.0, tokens - cost.inflection_tokens)
        share = cost.ranks / (ranks or cost.ranks)
        return share * (cost.flat_s + cost.token_s * beyond) + cost.bubble_s

    def scaled(self, factor: float) -> "Hardware":
        """The same with all times multiplied."""
        return _scaled(self, factor)

    def in_lockstep(self) -> "Hardware":
        """The same where every layer is a barrier."""
        return msgspec.structs.replace(self, links=self.sync_links)


def _scaled(table: TableT, factor: float) -> TableT:
    changes: dict[str, object] = {}
    for field in msgspec.structs.fields(table):
        value = getattr(table, field.name)
        if isinstance(value, Table):
            changes[field.name] = _scaled(value, factor)
        elif field.name.endswith("_s"):
            changes[field.name] = value * factor
    return msgspec.structs.replace(table, **changes)
