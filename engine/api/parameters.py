"""Request parameters: each is used, known to change nothing here, or refused by name.

A prefill instance computes a prompt and at most its first token. Parameters that only shape
later tokens are accepted where their value asks for nothing (n = 1, stop = null) and refused
otherwise, so that none is dropped silently.
"""

from typing import Annotated, Any, TypeVar

import msgspec

from engine.api.types import Kind, RequestError

MAX_LOGPROBS = 20

T = TypeVar("T")

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Alternatives = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
# What torch.Generator.manual_seed takes.
_Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Common(msgspec.Struct, forbid_unknown_fields=True):
    """What completions and chats share. None: not given."""

    model: str | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    prompt_logprobs: _Alternatives | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None  # -1, 0: no limit
    seed: _Seed | None = None


class Completion(Common, forbid_unknown_fields=True):
    prompt: str | list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Alternatives | None = None
    add_special_tokens: bool | None = None


class Chat(Common, forbid_unknown_fields=True):
    messages: list[dict[str, Any]] = []
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# Parameters that cannot change a first token or its log-probabilities, whatever they say.
_FREE = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls", "ignore_eos", "priority", "request_id", "include_stop_str_in_output",
    "spaces_between_special_tokens", "length_penalty", "stream_options", "early_stopping",
    "return_token_ids", "cache_salt", "include_reasoning",
}  # fmt: skip

# Parameters that ask for nothing at these values (null always asks for nothing).
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "stop": ([], ""), "stop_token_ids": ([],),
    "echo": (False,), "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,), "logit_bias": ({},),
    "bad_words": ([],), "allowed_token_ids": (), "use_beam_search": (False,), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (),
    "truncate_prompt_tokens": (), "skip_special_tokens": (True,), "detokenize": (True,),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "structured_outputs": (), "logits_processors": ([],), "documents": ([],),
    "chat_template": (), "continue_final_message": (False,), "kv_transfer_params": (),
    "mm_processor_kwargs": ({},),
}  # fmt: skip

_REASONS = {
    "echo": "it is not supported; ask for prompt_logprobs to get the prompt's tokens back",
    "stream": "results are written to a file, whole",
    "tools": "a prefill instance runs no tools",
    "n": "a prompt is prefilled once",
}


def parse_parameters(kind: Kind, body: dict[str, Any]) -> Completion | Chat:
    """The parameters that are used. Raises RequestError (400) that names the parameter."""
    shape: type[Completion | Chat] = Chat if kind == "chat" else Completion
    used = {}
    for name, value in body.items():
        if name in shape.__struct_fields__:
            used[name] = value
        elif not (name == "add_special_tokens" and value is False):  # a chat's template adds them
            _check_unused(name, value)
    parameters = convert(used, shape)
    _check_finite(parameters)
    return parameters


def convert(values: dict[str, Any], shape: type[T]) -> T:
    """`values` as a `shape`. Raises RequestError (400) that names the parameter."""
    try:
        return msgspec.convert(values, shape)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def token_limit(parameters: Common) -> int:
    """max_tokens as it counts here: 0 or 1, 1 when absent."""
    given = {
        name: value
        for name in ("max_tokens", "max_completion_tokens")
        if (value := getattr(parameters, name)) is not None
    }
    if len(set(given.values())) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ", param="max_tokens", code="invalid_value"
        )
    for name, value in given.items():
        if value > 1:
            raise RequestError(
                f"{name} is {value}, but this is a prefill instance: it computes the prompt and "
                "its first token. Use 1 (the default) or 0",
                param=name,
                code="prefill_only",
            )
        return int(value)
    return 1


def _check_unused(name: str, value: object) -> None:
    if name in _FREE:
        return
    if name not in _NEUTRAL:
        raise RequestError(f"unknown parameter {name!r}", param=name, code="unknown_parameter")
    if value is None or any(_same(value, neutral) for neutral in _NEUTRAL[name]):
        return
    reason = _REASONS.get(name, "it cannot matter to a prefill instance, which gives one token")
    raise RequestError(
        f"{name} = {value!r:.80} is refused: {reason}", param=name, code="unsupported_parameter"
    )


def _same(value: object, neutral: object) -> bool:
    """Equal, and true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _check_finite(parameters: Common) -> None:
    # JSON has no infinity, but a temperature of 1e308 would overflow float32 all the same.
    if parameters.temperature is not None and parameters.temperature > 1e6:
        raise RequestError("temperature is too large", param="temperature", code="invalid_value")


def _invalid(message: str) -> RequestError:
    """msgspec's message, with the parameter it is about taken from its path (`$.top_p`)."""
    problem, _, path = message.partition(" - at `$.")
    path = path.rstrip("`")
    param = path.split("[")[0].split(".")[0] or None
    text = f"{path}: {problem[0].lower()}{problem[1:]}" if param else problem
    return RequestError(text, param=param, code="invalid_type")
