"""Load for an OpenAI-compatible endpoint: completions of one token, of random prompts."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from engine.bench.endpoint import Endpoint, in_time, reason_of
from engine.bench.http_client import HttpClient
from engine.errors import RunError, UsageError

_PATH = "/v1/completions"
_FIRST_TOKEN = 4  # before it are padding, beginning, end and the like
# Vocabularies that are tried where an endpoint does not say its own: none of an MoE model has
# fewer than the first, and no tokenizer of bytes fewer than the second.
_VOCABULARIES = (32_000, 256)
_WARM_TOKENS = 16
_WARM_S = 120.0
_RETRY_S = 0.2
# About one token each, in most vocabularies.
_WORDS = (" time", " people", " way", " water", " day", " part", " sound", " work", " place")


class _Completion(msgspec.Struct):
    choices: list[dict[str, Any]]


_decoder = msgspec.json.Decoder(_Completion)
_encoder = msgspec.json.Encoder()


class HttpTarget:
    """A load's target. vocab_size: None for prompts of text, of about as many tokens.

    Prompts have no beginning in common, so that no cache of prefixes helps; another seed gives
    other ones.
    """

    def __init__(
        self, client: HttpClient, model: str, vocab_size: int | None, seed: Sequence[int]
    ) -> None:
        self._client = client
        self._model = model
        self._vocab_size = vocab_size
        self._seed = seed

    async def first_token(self, key: int, tokens: int) -> None:
        """Raises RunError, with the endpoint's reason."""
        body = _encoder.encode(
            {
                "model": self._model,
                "prompt": self.prompt(key, tokens),
                "max_tokens": 1,
                "temperature": 0,
            }
        )
        status, answer = await self._client.request("POST", _PATH, body)
        if status != 200:
            raise RefusedError(status, reason_of(status, answer))
        try:
            choices = _decoder.decode(answer).choices
        except ValueError:
            choices = []
        if not choices:
            raise RunError(f"no completion: {reason_of(status, answer)}")

    def prompt(self, key: int, tokens: int) -> list[int] | str:
        """The same for the same key, length and seed."""
        if self._vocab_size is None:
            rng = random.Random(f"{self._seed} {key}")
            return "".join(rng.choices(_WORDS, k=tokens))
        first = min(_FIRST_TOKEN, self._vocab_size - 1)
        generator = np.random.default_rng([*self._seed, key])
        ids: list[int] = generator.integers(first, self._vocab_size, tokens).tolist()
        return ids


class RefusedError(RunError):
    """An answer that is none. status: HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def vocabulary_of(client: HttpClient, endpoint: Endpoint, seed: Sequence[int]) -> int | None:
    """The vocabulary that prompts can be made of, None for text, found by sending short prompts;
    they warm the endpoint up, too. Raises UsageError: it takes none; RunError.
    """
    known = _VOCABULARIES if endpoint.vocab_size is None else (endpoint.vocab_size,)
    tokens = min(_WARM_TOKENS, endpoint.longest or _WARM_TOKENS)
    tried: tuple[int | None, ...] = (*known, None)
    for vocab_size in tried:
        target = HttpTarget(client, endpoint.model, vocab_size, seed)
        try:
            await in_time(target.first_token(0, tokens), _WARM_S, _PATH)
        except RefusedError as error:
            if error.status in (400, 413, 422) and vocab_size is not None:
                continue
            if error.status == 429 or error.status >= 500:
                raise
            raise UsageError(f"{_PATH} takes no prompts: {error}") from None
        return vocab_size
    raise AssertionError("text is the last")


async def settled(target: HttpTarget) -> None:
    """Returns once a short prompt is answered. Raises RunError."""

    async def answered() -> None:
        while True:
            try:
                return await target.first_token(0, 1)
            except RefusedError as error:
                if error.status not in (429, 503):
                    raise
            await asyncio.sleep(_RETRY_S)

    await in_time(answered(), _WARM_S, _PATH)
