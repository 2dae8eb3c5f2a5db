"""Results -> bodies of OpenAI's answers."""

import time
from collections.abc import Collection, Sequence
from typing import Any

from engine.api.logprobs import (
    chat_logprobs,
    completion_logprobs,
    no_completion_logprobs,
    prompt_logprobs,
)
from engine.api.tokenizer import Tokenizer
from engine.api.types import Prompt, RequestError
from engine.control.messages import PrefillResult


class AnswerWriter:
    """Makes the answers of one instance or run."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        eos_token_ids: Collection[int],
        fingerprint: str,
    ) -> None:
        """model: the name for requests that give none. fingerprint: goes to system_fingerprint."""
        self._tokenizer = tokenizer
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self._fingerprint = fingerprint

    def body(self, prompts: Sequence[Prompt], results: Sequence[PrefillResult]) -> dict[str, Any]:
        """The answer to one request: a choice for each of its prompts, in their order.

        Raises RequestError (500) when one of them failed.
        """
        for result in results:
            if result.error is not None:
                raise RequestError(result.error, code="prefill_failed", status=500)
        first = prompts[0]
        chat = first.kind == "chat"
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        completion_tokens = sum(prompt.max_tokens for prompt in prompts)
        body: dict[str, Any] = {
            "id": ("chatcmpl-" if chat else "cmpl-") + first.origin.suffix,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": first.model if first.model is not None else self._model,
            "choices": [
                self._choice(index, prompt, result)
                for index, (prompt, result) in enumerate(zip(prompts, results, strict=True))
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
            "system_fingerprint": self._fingerprint,
        }
        if chat and first.return_token_ids:
            body["prompt_token_ids"] = first.token_ids
        return body

    def _choice(self, index: int, prompt: Prompt, result: PrefillResult) -> dict[str, Any]:
        """max_tokens = 0 gives an empty text: nothing was chosen, the limit was reached."""
        chat = prompt.kind == "chat"
        generated = [result.token_id] if prompt.max_tokens else []
        text = "".join(self._text(token) for token in generated)
        choice: dict[str, Any] = {"index": index}
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(prompt, result)
        choice["finish_reason"] = "stop" if self._eos.intersection(generated) else "length"
        # Whoever goes on decoding needs the id, which the text does not always tell.
        choice["token_ids"] = generated
        if prompt.return_token_ids and not chat:  # vLLM puts a chat's beside the choices
            choice["prompt_token_ids"] = prompt.token_ids
        if prompt.prompt_logprobs is not None and result.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs, self._tokenizer)
        return choice

    def _logprobs(self, prompt: Prompt, result: PrefillResult) -> dict[str, Any] | None:
        if prompt.logprobs is None:
            return None
        chat = prompt.kind == "chat"
        if not prompt.max_tokens or not result.top:
            return {"content": [], "refusal": None} if chat else no_completion_logprobs()
        form = chat_logprobs if chat else completion_logprobs
        return form(result.top, prompt.logprobs, self._tokenizer)

    def _text(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        return piece.text if piece.known and not piece.special else ""


def error_body(failure: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": failure.message,
            "type": _error_type(failure.status),
            "param": failure.param,
            "code": failure.code,
        }
    }


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
