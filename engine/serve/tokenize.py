"""/tokenize: vLLM's shape. A prompt or messages -> token ids, without computing anything."""

from typing import Any

import msgspec

from engine.api.parameters import Chat, Completion, convert
from engine.api.prompts import chat_tokens, completion_tokens
from engine.api.tokenizer import Tokenizer
from engine.api.types import RequestError
from engine.serve.requests import check_model, parse_object


class _Common(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    return_token_strs: bool | None = None


class _Text(_Common, forbid_unknown_fields=True):
    prompt: str = ""
    add_special_tokens: bool | None = None


class _Messages(_Common, forbid_unknown_fields=True):
    messages: list[dict[str, Any]] = []
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def tokenize(raw: bytes, model: str, max_model_len: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer to the body `raw`. Raises RequestError."""
    body = parse_object(raw)
    check_model(body, model)
    if ("prompt" in body) == ("messages" in body):
        raise RequestError("give either prompt or messages", param="prompt", code="invalid_prompt")
    of = _of_chat if "messages" in body else _of_text
    returns_texts, tokens = of(body, tokenizer, max_model_len)
    texts = [tokenizer.piece(token).text for token in tokens] if returns_texts else None
    return {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }


def _of_text(
    body: dict[str, Any], tokenizer: Tokenizer, most: int
) -> tuple[bool | None, list[int]]:
    asked = convert(body, _Text)
    text = Completion(add_special_tokens=asked.add_special_tokens)
    return asked.return_token_strs, completion_tokens(asked.prompt, text, tokenizer, most)


def _of_chat(
    body: dict[str, Any], tokenizer: Tokenizer, most: int
) -> tuple[bool | None, list[int]]:
    asked = convert(body, _Messages)
    chat = Chat(
        messages=asked.messages,
        add_generation_prompt=asked.add_generation_prompt,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    return asked.return_token_strs, chat_tokens(chat, tokenizer, most)
