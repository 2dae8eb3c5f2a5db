"""An answer as OpenAI's server-sent events. All of it is known when the first event goes out."""

from typing import Any

import msgspec

from engine.serve.requests import StreamOptions

_encode = msgspec.json.Encoder().encode


def events(body: dict[str, Any], options: StreamOptions) -> bytes:
    """One chunk for each choice of `body`, the usage when it was asked for, and [DONE]."""
    common = {key: body[key] for key in ("id", "created", "model", "system_fingerprint")}
    chat = body["object"] == "chat.completion"
    common["object"] = "chat.completion.chunk" if chat else body["object"]
    if options.include_usage or options.continuous_usage_stats:
        common["usage"] = body["usage"] if options.continuous_usage_stats else None
    chunks = [
        {**common, "choices": [_delta(choice) if chat else choice]} for choice in body["choices"]
    ]
    if "prompt_token_ids" in body:  # a chat's; a completion has it in its choices
        chunks[0]["prompt_token_ids"] = body["prompt_token_ids"]
    if "kv_transfer_params" in body:
        chunks[-1]["kv_transfer_params"] = body["kv_transfer_params"]
    if options.include_usage:
        chunks.append({**common, "choices": [], "usage": body["usage"]})
    return b"".join(b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    """A chat's choice as the difference to nothing."""
    return {"delta" if key == "message" else key: value for key, value in choice.items()}
