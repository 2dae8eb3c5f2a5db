"""The plain types that policies, controller and attention ranks exchange."""

import msgspec


class Request(msgspec.Struct, frozen=True):
    """A prompt waiting to be scheduled: its key, its length in tokens, when it came (seconds)."""

    key: int
    tokens: int
    arrival: float


class Segment(msgspec.Struct, frozen=True):
    """`length` tokens of the prompt `key`, from position `start`. A whole prompt starts at 0."""

    key: int
    start: int
    length: int


class Batch(msgspec.Struct, frozen=True):
    """Segments that one attention group carries together from embedding to last layer."""

    id: int
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        return sum(segment.length for segment in self.segments)


class Step(msgspec.Struct, frozen=True):
    """What groups in lockstep do at the same time. id: of one of their batches. most_tokens: of the
    largest one.
    """

    id: int
    most_tokens: int


class Assignment(msgspec.Struct, frozen=True):
    """Batches handed to one idle attention group, one for each lane in use. step: where all groups
    go through the layers together.
    """

    group: int
    batches: tuple[Batch, ...]
    step: Step | None = None
