"""Validated parameters -> the prompt's token ids, within what the model can take."""

from collections.abc import Sequence
from typing import Any

from engine.api.parameters import Chat, Completion
from engine.api.tokenizer import Tokenizer
from engine.api.types import RequestError
from engine.api.wording import show
from engine.echo import cut

_MESSAGE_KEYS = {"role", "content", "name"}


def given_prompts(parameters: Completion) -> list[str | list[int]]:
    """The prompts of a completion as they were given, text or token ids; at least one.

    Raises RequestError: no prompt, or one of the wrong type.
    """
    prompt, ids = parameters.prompt, parameters.prompt_token_ids
    if ids is not None:
        if prompt is not None:
            raise _invalid_prompt("given twice, as prompt and prompt_token_ids")
        return [ids]
    if prompt is None:
        raise _invalid_prompt("missing")
    if isinstance(prompt, str) or all(_is_id(item) for item in prompt):
        return [prompt]
    # A list of prompts, each text or token ids.
    for item in prompt:
        is_ids = isinstance(item, list) and all(_is_id(entry) for entry in item)
        if not isinstance(item, str) and not is_ids:
            raise RequestError(
                "prompt must be a string, an array of token ids, or an array of either",
                param="prompt",
                code="invalid_type",
            )
    return prompt


def completion_tokens(
    prompt: str | list[int], parameters: Completion, tokenizer: Tokenizer, most: int
) -> list[int]:
    """Token ids of one of `given_prompts`, not much more than `most`.

    Raises RequestError: there is no tokenizer, it cannot take the text, or that is far too long.
    """
    if not isinstance(prompt, str):
        return prompt
    if not prompt:
        return []
    return tokenizer.encode(
        prompt, add_special_tokens=parameters.add_special_tokens is not False, most=most
    )


def chat_tokens(parameters: Chat, tokenizer: Tokenizer, most: int) -> list[int]:
    """As `completion_tokens`. Raises RequestError also for messages of the wrong shape, or that the
    template refuses.
    """
    if not parameters.messages:
        raise RequestError("messages is empty", param="messages", code="empty_prompt")
    return tokenizer.encode_chat(
        [_message(index, message) for index, message in enumerate(parameters.messages)],
        add_generation_prompt=parameters.add_generation_prompt is not False,
        options=parameters.chat_template_kwargs,
        most=most,
    )


def check_tokens(token_ids: Sequence[int], vocab_size: int, max_model_len: int, param: str) -> None:
    """Raises RequestError unless 1 to max_model_len ids, each below vocab_size."""
    if not token_ids:
        raise RequestError("the prompt is empty", param=param, code="empty_prompt")
    if len(token_ids) > max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but max_model_len is {max_model_len}",
            param=param,
            code="context_length_exceeded",
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        at, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise RequestError(
            f"token id {show(token)} at position {at} is outside the vocabulary "
            f"(0 to {vocab_size - 1})",
            param=param,
            code="token_out_of_range",
        )


def _invalid_prompt(problem: str) -> RequestError:
    return RequestError(f"the prompt is {problem}", param="prompt", code="invalid_prompt")


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: content as one string."""
    where = f"messages[{index}]"
    for key, value in message.items():
        if key not in _MESSAGE_KEYS and value is not None:
            place = f"{where}.{cut(key)}"
            raise RequestError(f"{place} is not supported", param=place, code="unknown_parameter")
    for key in ("role", "name"):
        value = message.get(key)
        if not isinstance(value, str) and (key == "role" or value is not None):
            raise RequestError(
                f"{where}.{key} must be a string", param=f"{where}.{key}", code="invalid_type"
            )
    plain = {key: message[key] for key in ("role", "name") if message.get(key) is not None}
    return {**plain, "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} must be a string or an array of text parts", param=where, code="invalid_type"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"type {show(kind)}" if kind != "text" else "text that is not a string"
            raise RequestError(
                f"{where}[{index}] has {named}; only text parts are supported",
                param=f"{where}[{index}]",
                code="unsupported_content",
            )
        texts.append(part["text"])
    return "\n".join(texts)
