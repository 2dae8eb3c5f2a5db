"""The plain types that parsing, the loop and the records share."""

from typing import Literal, TypeAlias

import msgspec

from engine.control.messages import Sampling

Kind: TypeAlias = Literal["completion", "chat"]


class LineError(Exception):
    """Why one line cannot be done. Becomes the line's error record; never leaves this package.

    param: the parameter at fault, code: a short machine-readable reason; both as in OpenAI's
    error object.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class Origin(msgspec.Struct, frozen=True):
    """Where a record belongs: the line's number, its id (or `line-N`) and its record's id."""

    number: int
    custom_id: str
    record: str


class Prompt(msgspec.Struct, frozen=True):
    """A line that is ready to run. logprobs and prompt_logprobs: alternatives, None for none."""

    origin: Origin
    kind: Kind
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int  # 0 or 1
    logprobs: int | None
    prompt_logprobs: int | None
    model: str | None  # as the line names it; recorded, not matched
