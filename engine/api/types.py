"""The plain types that parsing, tokenising and the answers share."""

from typing import Literal, TypeAlias

import msgspec

from engine.control.messages import Sampling
from engine.echo import cut

Kind: TypeAlias = Literal["completion", "chat"]

# Several problems fit; each of them echoes little by itself.
_MOST_MESSAGE = 2000


class RequestError(Exception):
    """Why one request cannot be done. Becomes its answer; whoever parses catches it.

    param: the parameter at fault, code: a short machine-readable reason; both as in OpenAI's
    error object. message and param are cut: whoever sends megabytes does not get them back.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        self.message = cut(message, _MOST_MESSAGE)
        super().__init__(self.message)
        self.param = None if param is None else cut(param)
        self.code = code
        self.status = status


class Origin(msgspec.Struct, frozen=True):
    """Where a request comes from: the line's number, its id (or `line-N`) and its record's id.

    A request over HTTP has number 0 and its own id for both.
    """

    number: int
    custom_id: str
    record: str

    @property
    def suffix(self) -> str:
        """What the ids of the request and of its answer share."""
        return self.record.removeprefix("batch_req_")


class Prompt(msgspec.Struct, frozen=True):
    """A request that is ready to run. logprobs and prompt_logprobs: alternatives, None for none."""

    origin: Origin
    kind: Kind
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int  # 0 or 1
    logprobs: int | None
    prompt_logprobs: int | None
    model: str | None  # as the request names it; recorded, not matched
    return_token_ids: bool = False
