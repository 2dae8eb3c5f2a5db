"""Results and failures -> records of OpenAI's batch output, one line of JSON each."""

import json
import time
from collections.abc import Collection
from typing import Any

from engine.control.messages import PrefillResult
from engine.offline.logprobs import (
    chat_logprobs,
    completion_logprobs,
    no_completion_logprobs,
    prompt_logprobs,
)
from engine.offline.tokenizer import Tokenizer
from engine.offline.types import LineError, Origin, Prompt


class RecordWriter:
    """Makes the records of one run."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        eos_token_ids: Collection[int],
        fingerprint: str,
    ) -> None:
        """model: the name for lines that give none. fingerprint: goes to system_fingerprint."""
        self._tokenizer = tokenizer
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self._fingerprint = fingerprint

    def result(self, prompt: Prompt, result: PrefillResult) -> bytes:
        """The record of a prompt that was computed; an error record when that failed."""
        if result.error is not None:
            failure = LineError(result.error, code="prefill_failed", status=500)
            return self.failure(prompt.origin, failure)
        chat = prompt.kind == "chat"
        completion_tokens = prompt.max_tokens
        body: dict[str, Any] = {
            "id": ("chatcmpl-" if chat else "cmpl-") + _suffix(prompt.origin),
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": prompt.model if prompt.model is not None else self._model,
            "choices": [self._choice(prompt, result)],
            "usage": {
                "prompt_tokens": len(prompt.token_ids),
                "completion_tokens": completion_tokens,
                "total_tokens": len(prompt.token_ids) + completion_tokens,
            },
            "system_fingerprint": self._fingerprint,
        }
        if result.kv is not None:
            body["kv"] = {
                "path": result.kv.path,
                "tokens": result.kv.tokens,
                "token_sha256": result.kv.token_sha256,
            }
        return _line(prompt.origin, 200, body, None)

    def failure(self, origin: Origin, failure: LineError) -> bytes:
        """The record of a line that cannot be done; its message begins with the line's number."""
        message = f"line {origin.number}: {failure.message}"
        kind = "invalid_request_error" if failure.status < 500 else "server_error"
        body = {
            "error": {
                "message": message,
                "type": kind,
                "param": failure.param,
                "code": failure.code,
            }
        }
        error = {"code": failure.code or kind, "message": message, "line": origin.number}
        return _line(origin, failure.status, body, error)

    def _choice(self, prompt: Prompt, result: PrefillResult) -> dict[str, Any]:
        """max_tokens = 0 gives an empty text: nothing was chosen, the limit was reached."""
        chat = prompt.kind == "chat"
        generated = [result.token_id] if prompt.max_tokens else []
        text = "".join(self._text(token) for token in generated)
        choice: dict[str, Any] = {"index": 0}
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(prompt, result)
        choice["finish_reason"] = "stop" if self._eos.intersection(generated) else "length"
        # Whoever goes on decoding needs the id, which the text does not always tell.
        choice["token_ids"] = generated
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


def _suffix(origin: Origin) -> str:
    return origin.record.removeprefix("batch_req_")


def _line(origin: Origin, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> bytes:
    record = {
        "id": origin.record,
        "custom_id": origin.custom_id,
        "response": {
            "status_code": status,
            "request_id": "req_" + _suffix(origin),
            "body": body,
        },
        "error": error,
    }
    # ASCII keeps U+2028 and its like from ending a line for readers that split on them.
    text = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"
