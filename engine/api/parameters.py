"""Request parameters: each is used, known to change nothing here, or refused by name.

A prefill instance computes a prompt and at most its first token. Parameters that only shape
later tokens are accepted where their value asks for nothing (n = 1, stop = null) and refused
otherwise, so that none is dropped silently.
"""

from typing import Annotated, Any, TypeVar

import msgspec

from engine.api.types import Kind, RequestError
from engine.api.wording import accepts, expected, mismatch, show

MAX_LOGPROBS = 20
_MOST_PROBLEMS = 10  # of one request that are named; it may have millions

T = TypeVar("T")

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Alternatives = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
# What torch.Generator.manual_seed takes.
_Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Common(msgspec.Struct, forbid_unknown_fields=True):
    """What completions and chats share. None: not given."""

    model: Annotated[str, msgspec.Meta(max_length=512)] | None = None  # goes into every record
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    prompt_logprobs: _Alternatives | None = None
    # JSON has no infinity, but 1e308 would overflow float32 all the same.
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None  # -1, 0: no limit
    seed: _Seed | None = None
    return_token_ids: bool | None = None


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
    "cache_salt", "include_reasoning",
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


# A parameter of the other API, and what to do about it.
_OTHERS: dict[Kind, dict[str, str]] = {
    "chat": dict.fromkeys(
        ("prompt", "prompt_token_ids"),
        "a chat takes messages; send a prompt to /v1/completions",
    ),
    "completion": {
        "messages": "a completion takes a prompt; send messages to /v1/chat/completions"
    },
}


def parse_parameters(kind: Kind, body: dict[str, Any]) -> Completion | Chat:
    """The parameters that are used.

    Raises RequestError (400) that names every parameter at fault, up to ten; its `param` and `code`
    are the first one's.
    """
    shape: type[Completion | Chat] = Chat if kind == "chat" else Completion
    hints = _hints(shape)
    used, problems = {}, []
    for name, value in body.items():
        try:
            if name in hints:
                used[name] = _convert(name, value, hints[name])
            elif not (name == "add_special_tokens" and value is False):  # a chat's template does
                _check_unused(kind, name, value)
        except RequestError as problem:
            problems.append(problem)
            if len(problems) == _MOST_PROBLEMS:
                break
    problems += _limit_problems(used)
    if problems:
        raise _joined(problems)
    return shape(**used)


def convert(values: dict[str, Any], shape: type[T]) -> T:
    """`values` as a `shape`. Raises RequestError (400) that names every parameter at fault."""
    hints = _hints(shape)
    converted, problems = {}, []
    for name, value in values.items():
        try:
            if name not in hints:
                raise _unknown(name)
            converted[name] = _convert(name, value, hints[name])
        except RequestError as problem:
            problems.append(problem)
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise _joined(problems)
    return shape(**converted)


def token_limit(parameters: Common) -> int:
    """max_tokens as it counts here: 0 or 1, 1 when absent."""
    for limit in (parameters.max_tokens, parameters.max_completion_tokens):
        if limit is not None:
            return limit
    return 1


def _hints(shape: type) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(shape)}


def _convert(name: str, value: Any, hint: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and not accepts(hint, float):
        value = int(value)  # 1.0 is the number 1 in JSON
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        where, problem = mismatch(error)
        if where:
            glue = "" if problem.startswith("must") else ":"
            raise RequestError(
                f"{name}{where}{glue} {problem}", param=name, code="invalid_type"
            ) from None
        fits = accepts(hint, type(value))
        raise RequestError(
            f"{name} must be {expected(hint)}, not {show(value)}",
            param=name,
            code="invalid_value" if fits else "invalid_type",
        ) from None


def _limit_problems(used: dict[str, Any]) -> list[RequestError]:
    """What is wrong with max_tokens and max_completion_tokens, each of which is a number."""
    given = {
        name: used[name]
        for name in ("max_tokens", "max_completion_tokens")
        if used.get(name) is not None
    }
    problems = [
        RequestError(
            f"{name} is {value}, but this is a prefill instance: it computes the prompt and its "
            "first token. Use 1 (the default) or 0",
            param=name,
            code="prefill_only",
        )
        for name, value in given.items()
        if value > 1
    ]
    if not problems and len(set(given.values())) > 1:
        problems.append(
            RequestError(
                "max_tokens and max_completion_tokens differ",
                param="max_tokens",
                code="invalid_value",
            )
        )
    return problems


def _check_unused(kind: Kind, name: str, value: object) -> None:
    if name in _FREE:
        return
    if name not in _NEUTRAL:
        raise _unknown(name, _OTHERS[kind].get(name))
    if value is None or any(_same(value, neutral) for neutral in _NEUTRAL[name]):
        return
    reason = _REASONS.get(name, "it cannot matter to a prefill instance, which gives one token")
    raise RequestError(
        f"{name}: {show(value)} is refused: {reason}", param=name, code="unsupported_parameter"
    )


def _unknown(name: str, remedy: str | None = None) -> RequestError:
    text = f"unknown parameter {show(name)}" + (f": {remedy}" if remedy else "")
    return RequestError(text, param=name, code="unknown_parameter")


def _same(value: object, neutral: object) -> bool:
    """Equal, and true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _joined(problems: list[RequestError]) -> RequestError:
    first = problems[0]
    message = "; ".join(problem.message for problem in problems)
    return RequestError(message, param=first.param, code=first.code)
