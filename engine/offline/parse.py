"""An input line -> a Prompt that is ready to run. Raises LineError for the line alone."""

from typing import Any

import msgspec

from engine.control.messages import Sampling
from engine.offline.forms import split_form
from engine.offline.ids import seed_of
from engine.offline.parameters import Chat, Common, parse_parameters, token_limit
from engine.offline.prompts import chat_tokens, check_tokens, completion_tokens
from engine.offline.tokenizer import Tokenizer
from engine.offline.types import LineError, Origin, Prompt


class Limits(msgspec.Struct, frozen=True):
    """What the model can take, and what is reported for lines that do not ask themselves."""

    vocab_size: int
    max_model_len: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Parser:
    def __init__(self, limits: Limits, tokenizer: Tokenizer) -> None:
        self._limits = limits
        self._tokenizer = tokenizer

    def parse(self, origin: Origin, document: dict[str, Any]) -> Prompt:
        """Raises LineError that says which parameter is at fault."""
        kind, body = split_form(document)
        parameters = parse_parameters(kind, body)
        max_tokens = token_limit(parameters)
        if isinstance(parameters, Chat):
            param = "messages"
            logprobs = self._chat_logprobs(parameters)
            token_ids = chat_tokens(parameters, self._tokenizer)
        else:
            param = "prompt_token_ids" if parameters.prompt is None else "prompt"
            logprobs = _first(parameters.logprobs, self._limits.logprobs)
            token_ids = completion_tokens(parameters, self._tokenizer)
        check_tokens(token_ids, self._limits.vocab_size, self._limits.max_model_len, param)
        return Prompt(
            origin=origin,
            kind=kind,
            token_ids=token_ids,
            sampling=_sampling(parameters, origin),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=_first(parameters.prompt_logprobs, self._limits.prompt_logprobs),
            model=parameters.model,
        )

    def _chat_logprobs(self, parameters: Chat) -> int | None:
        if parameters.logprobs is None and parameters.top_logprobs is None:
            return self._limits.logprobs
        if parameters.logprobs:
            return parameters.top_logprobs or 0
        if parameters.top_logprobs:
            raise LineError(
                "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value"
            )
        return None


def _sampling(parameters: Common, origin: Origin) -> Sampling:
    if not parameters.temperature:
        return Sampling()
    seed = parameters.seed if parameters.seed is not None else seed_of(origin.record)
    return Sampling(
        temperature=parameters.temperature,
        top_p=_first(parameters.top_p, 1.0) or 1.0,
        top_k=max(parameters.top_k or 0, 0),
        seed=seed,
    )


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given
