"""Log-probabilities in the three forms of the APIs: completions', chats' and vLLM's for prompts."""

import math
from collections.abc import Sequence
from typing import Any

from engine.api.tokenizer import Tokenizer
from engine.control.messages import TokenLogprob

# What OpenAI and vLLM write for a token that cannot be: JSON has no infinity.
LOWEST = -9999.0


def finite(logprob: float) -> float:
    """`logprob`, or LOWEST where it is no number that JSON knows or lies below it."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def completion_logprobs(
    top: Sequence[TokenLogprob], alternatives: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The `logprobs` object of a completion with one token.

    top: the chosen token, then at least `alternatives` tokens by rank. The chosen one is among
    top_logprobs always, as OpenAI's API has it.
    """
    chosen = top[0]
    text = tokenizer.piece(chosen.token_id).key
    best: dict[str, float] = {}
    for entry in [*top[1 : alternatives + 1], chosen]:
        # Different tokens may read the same; the likelier one stays.
        best.setdefault(tokenizer.piece(entry.token_id).key, finite(entry.logprob))
    return {
        "tokens": [text],
        "token_logprobs": [finite(chosen.logprob)],
        "top_logprobs": [best],
        "text_offset": [0],
    }


def no_completion_logprobs() -> dict[str, Any]:
    """For max_tokens = 0."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def chat_logprobs(
    top: Sequence[TokenLogprob], alternatives: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice with one token; `top` as in completion_logprobs."""
    content = _chat_entry(top[0], tokenizer)
    content["top_logprobs"] = [_chat_entry(entry, tokenizer) for entry in top[1 : alternatives + 1]]
    return {"content": [content], "refusal": None}


def prompt_logprobs(
    positions: Sequence[Sequence[TokenLogprob] | None], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token a map of token id to logprob, rank and text.

    positions: for each token of the prompt the token itself, then the likeliest ones; None for
    the first, which nothing predicts.
    """
    return [None if entries is None else _by_id(entries, tokenizer) for entries in positions]


def _by_id(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        str(entry.token_id): {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": tokenizer.piece(entry.token_id).text,
        }
        for entry in entries
    }


def _chat_entry(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.piece(entry.token_id)
    return {
        "token": piece.text,
        "logprob": finite(entry.logprob),
        "bytes": None if piece.data is None else list(piece.data),
    }
