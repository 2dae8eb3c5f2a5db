"""A request's parameters -> prompts that are ready to run."""

from typing import Any

import msgspec

from engine.api.ids import seed_of
from engine.api.parameters import Chat, Common, Completion, parse_parameters, token_limit
from engine.api.prompts import chat_tokens, check_tokens, completion_tokens, given_prompts
from engine.api.tokenizer import Tokenizer
from engine.api.types import Kind, Origin, Prompt, RequestError
from engine.control.messages import Sampling


class Limits(msgspec.Struct, frozen=True):
    """What the model can take, and what is reported for requests that do not ask themselves.

    most_prompts: of one completion request.
    """

    vocab_size: int
    max_model_len: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    most_prompts: int = 1


class Parser:
    def __init__(self, limits: Limits, tokenizer: Tokenizer) -> None:
        self._limits = limits
        self._tokenizer = tokenizer

    def parse(self, origin: Origin, kind: Kind, body: dict[str, Any]) -> list[Prompt]:
        """The prompts of one request, at least one. Raises RequestError naming the parameter.

        A completion may hold several, which share its parameters; a chat is one.
        """
        parameters = parse_parameters(kind, body)
        max_tokens = token_limit(parameters)
        if isinstance(parameters, Chat):
            logprobs = self._chat_logprobs(parameters)
        else:
            logprobs = _first(parameters.logprobs, self._limits.logprobs)
        tokens = self._tokens(parameters)
        return [
            Prompt(
                origin=origin,
                kind=kind,
                token_ids=token_ids,
                sampling=_sampling(parameters, origin, index),
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=_first(parameters.prompt_logprobs, self._limits.prompt_logprobs),
                model=parameters.model,
                return_token_ids=parameters.return_token_ids is True,
            )
            for index, token_ids in enumerate(tokens)
        ]

    def _tokens(self, parameters: Completion | Chat) -> list[list[int]]:
        """The token ids of each prompt, checked."""
        most = self._limits.max_model_len
        if isinstance(parameters, Chat):
            param = "messages"
            tokens = [chat_tokens(parameters, self._tokenizer, most)]
        else:
            param = "prompt_token_ids" if parameters.prompt is None else "prompt"
            given = given_prompts(parameters)
            self._check_number(given)
            tokens = [
                completion_tokens(prompt, parameters, self._tokenizer, most) for prompt in given
            ]
        for token_ids in tokens:
            check_tokens(token_ids, self._limits.vocab_size, most, param)
        return tokens

    def _check_number(self, prompts: list[str | list[int]]) -> None:
        most = self._limits.most_prompts
        if len(prompts) > most:
            raise RequestError(
                f"prompt holds {len(prompts)} prompts; at most {most} here",
                param="prompt",
                code="several_prompts",
            )

    def _chat_logprobs(self, parameters: Chat) -> int | None:
        if parameters.logprobs is None and parameters.top_logprobs is None:
            return self._limits.logprobs
        if parameters.logprobs:
            return parameters.top_logprobs or 0
        if parameters.top_logprobs:
            raise RequestError(
                "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value"
            )
        return None


def _sampling(parameters: Common, origin: Origin, index: int) -> Sampling:
    """index: of the prompt in its request."""
    if not parameters.temperature:
        return Sampling()
    seed = parameters.seed
    if seed is None:
        seed = seed_of(f"{origin.record}-{index}" if index else origin.record)
    return Sampling(
        temperature=parameters.temperature,
        top_p=_first(parameters.top_p, 1.0) or 1.0,
        top_k=max(parameters.top_k or 0, 0),
        seed=seed,
    )


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given
