"""Results and failures -> records of OpenAI's batch output, one line of JSON each."""

import json
from typing import Any

from engine.api.answers import AnswerWriter, error_body
from engine.api.types import Origin, Prompt, RequestError
from engine.control.messages import PrefillResult


class RecordWriter:
    """Makes the records of one run."""

    def __init__(self, answers: AnswerWriter) -> None:
        self._answers = answers

    def result(self, prompt: Prompt, result: PrefillResult) -> bytes:
        """The record of a prompt that was computed; an error record when that failed."""
        try:
            body = self._answers.body([prompt], [result])
        except RequestError as failure:
            return self.failure(prompt.origin, failure)
        if result.kv is not None:
            body["kv"] = {
                "path": result.kv.path,
                "tokens": result.kv.tokens,
                "token_sha256": result.kv.token_sha256,
            }
        return _line(prompt.origin, 200, body, None)

    def failure(self, origin: Origin, failure: RequestError) -> bytes:
        """The record of a line that cannot be done; its message begins with the line's number."""
        body = error_body(failure)
        error = body["error"]
        error["message"] = message = numbered(origin, failure)
        brief = {"code": error["code"] or error["type"], "message": message, "line": origin.number}
        return _line(origin, failure.status, body, brief)


def numbered(origin: Origin, failure: RequestError) -> str:
    return f"line {origin.number}: {failure.message}"


def _line(origin: Origin, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> bytes:
    record = {
        "id": origin.record,
        "custom_id": origin.custom_id,
        "response": {
            "status_code": status,
            "request_id": "req_" + origin.suffix,
            "body": body,
        },
        "error": error,
    }
    # ASCII keeps U+2028 and its like from ending a line for readers that split on them.
    text = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"
