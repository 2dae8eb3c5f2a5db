"""Validated parameters -> the prompt's token ids, within what the model can take."""

from collections.abc import Sequence
from typing import Any

from engine.offline.parameters import Chat, Completion
from engine.offline.tokenizer import Tokenizer
from engine.offline.types import LineError

_MESSAGE_KEYS = {"role", "content", "name"}


def completion_tokens(parameters: Completion, tokenizer: Tokenizer) -> list[int]:
    """Raises LineError: no prompt, several, an empty one, or one of the wrong type."""
    prompt, ids = parameters.prompt, parameters.prompt_token_ids
    if (prompt is None) == (ids is None):
        problem = "missing" if prompt is None else "given twice, as prompt and prompt_token_ids"
        raise LineError(f"the prompt is {problem}", param="prompt", code="invalid_prompt")
    if ids is not None:
        return ids
    if isinstance(prompt, list):
        prompt = _only_prompt(prompt)
    if not isinstance(prompt, str):
        return prompt or []
    if not prompt:
        return []
    return tokenizer.encode(prompt, add_special_tokens=parameters.add_special_tokens is not False)


def chat_tokens(parameters: Chat, tokenizer: Tokenizer) -> list[int]:
    """Raises LineError: messages of the wrong shape, or that the template refuses."""
    if not parameters.messages:
        raise LineError("messages is empty", param="messages", code="empty_prompt")
    return tokenizer.encode_chat(
        [_message(index, message) for index, message in enumerate(parameters.messages)],
        add_generation_prompt=parameters.add_generation_prompt is not False,
        options=parameters.chat_template_kwargs,
    )


def check_tokens(token_ids: Sequence[int], vocab_size: int, max_model_len: int, param: str) -> None:
    """Raises LineError unless 1 to max_model_len ids, each below vocab_size."""
    if not token_ids:
        raise LineError("the prompt is empty", param=param, code="empty_prompt")
    if len(token_ids) > max_model_len:
        raise LineError(
            f"the prompt has {len(token_ids)} tokens, but max_model_len is {max_model_len}",
            param=param,
            code="context_length_exceeded",
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        at, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise LineError(
            f"token id {token} at position {at} is outside the vocabulary (0 to {vocab_size - 1})",
            param=param,
            code="token_out_of_range",
        )


def _only_prompt(prompts: list[Any]) -> str | list[int]:
    """OpenAI's list forms: token ids, or a list with one prompt in it."""
    if all(_is_id(item) for item in prompts):
        return prompts
    if len(prompts) > 1 and all(isinstance(item, str | list) for item in prompts):
        raise LineError(
            f"prompt holds {len(prompts)} prompts; one prompt a line",
            param="prompt",
            code="several_prompts",
        )
    prompt = prompts[0]
    if len(prompts) == 1 and isinstance(prompt, str):
        return prompt
    if len(prompts) == 1 and isinstance(prompt, list) and all(_is_id(item) for item in prompt):
        return prompt
    raise LineError(
        "prompt must be a string or an array of token ids", param="prompt", code="invalid_type"
    )


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: content as one string."""
    where = f"messages[{index}]"
    for key, value in message.items():
        if key not in _MESSAGE_KEYS and value is not None:
            raise LineError(
                f"{where}.{key} is not supported", param=f"{where}.{key}", code="unknown_parameter"
            )
    for key in ("role", "name"):
        value = message.get(key)
        if not isinstance(value, str) and (key == "role" or value is not None):
            raise LineError(
                f"{where}.{key} must be a string", param=f"{where}.{key}", code="invalid_type"
            )
    plain = {key: message[key] for key in ("role", "name") if message.get(key) is not None}
    return {**plain, "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise LineError(
            f"{where} must be a string or an array of text parts", param=where, code="invalid_type"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"type {kind!r}" if kind != "text" else "text that is not a string"
            raise LineError(
                f"{where}[{index}] has {named}; only text parts are supported",
                param=f"{where}[{index}]",
                code="unsupported_content",
            )
        texts.append(part["text"])
    return "\n".join(texts)
