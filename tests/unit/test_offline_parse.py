import json
from typing import Any

import pytest

from engine.api.chat_template import ChatTemplate
from engine.api.tokenizer import Tokenizer
from engine.api.types import Prompt, RequestError
from engine.offline.forms import read_line, split_form
from helpers.offline import BOS, ByteCodec, byte_tokenizer, line, parser, writer


def parse(document: Any, tokenizer: Tokenizer | None = None, **limits: Any) -> Prompt:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    origin, content = read_line(line(data, number=7))
    if isinstance(content, RequestError):
        raise content
    (prompt,) = parser(tokenizer, **limits).parse(origin, *split_form(content))
    return prompt


def refusal(document: Any, tokenizer: Tokenizer | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(document, tokenizer)
    assert caught.value.status == 400
    return caught.value


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}


def chat(**body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages} | body
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_the_four_shapes() -> None:
    assert parse({"prompt": "hi"}).token_ids == [BOS, *b"hi"]
    assert parse({"prompt_token_ids": [5, 6]}).token_ids == [5, 6]
    message = parse({"id": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert bytes(message.token_ids) == b"user:hi\nassistant:"  # no bos: the template writes it
    assert (message.kind, message.origin.custom_id) == ("chat", "m")
    batch = parse(completion(prompt="hi", model="other"))
    assert (batch.kind, batch.model, batch.origin.custom_id) == ("completion", "other", "a")
    assert parse({"prompt": "hi"}).origin.custom_id == "line-7"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("hi", [BOS, *b"hi"]), (["hi"], [BOS, *b"hi"]), ([5, 6], [5, 6]), ([[5, 6]], [5, 6])],
)
def test_prompt_forms(prompt: Any, expected: list[int]) -> None:
    assert parse(completion(prompt=prompt)).token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "empty_prompt"), ([], "empty_prompt"), ([[]], "empty_prompt"), ([""], "empty_prompt"),
        (["a", "b"], "several_prompts"), ([[1], [2]], "several_prompts"),
        ([1, "a"], "invalid_type"), ([1.0], "invalid_type"), ([True], "invalid_type"),
        ([None], "invalid_type"), (5, "invalid_type"), ({}, "invalid_type"),
        (None, "invalid_prompt"), ([3, 256], "token_out_of_range"), ([-1], "token_out_of_range"),
        ([3] * 51, "context_length_exceeded"), ([10**30], "token_out_of_range"),
    ],
)  # fmt: skip
def test_prompts_that_are_refused(prompt: Any, code: str) -> None:
    failure = refusal(completion(prompt=prompt))
    assert (failure.code, failure.param) == (code, "prompt")


def test_the_longest_prompt_fits() -> None:
    assert len(parse(completion(prompt=[3] * 50)).token_ids) == 50


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"nonsense", "invalid_json"), (b'{"prompt": NaN}', "invalid_json"),
        (b'{"prompt": "a"} x', "invalid_json"), (b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "unpaired_surrogate"), (b'{"prompt": "\xff"}', "invalid_utf8"),
        (b"[1]", "invalid_shape"), (b"null", "invalid_shape"), (b'"a"', "invalid_shape"),
        (b"7", "invalid_shape"), (b"{}", "invalid_shape"),
        (b'{"prompt": "a", "messages": []}', "invalid_shape"),
        (b'{"prompt": "a", "id": 5}', "invalid_type"),
        (b'{"prompt": "a", "id": ""}', "invalid_type"),
        (b'{"prompt": "a", "id": "1", "custom_id": "2"}', "invalid_shape"),
        (b'{"prompt": "a", "prompts": 1}', "unknown_parameter"),
    ],
)  # fmt: skip
def test_lines_that_are_no_request(data: bytes, code: str) -> None:
    assert refusal(data).code == code


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"url": "/v1/embeddings"}, "url"), ({"url": None}, "url"), ({"method": "GET"}, "method"),
        ({"body": [1]}, "body"), ({"temperature": 1}, "temperature"),
    ],
)  # fmt: skip
def test_batch_lines_of_the_wrong_shape(change: dict[str, Any], param: str) -> None:
    assert refusal(completion(prompt="a") | change).param == param


def test_a_line_over_the_limit() -> None:
    origin, content = read_line(line(None, number=3))
    assert isinstance(content, RequestError)
    assert (origin.custom_id, content.code) == ("line-3", "too_long")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_token_limits(name: str) -> None:
    assert parse(completion(prompt="a")).max_tokens == 1
    assert parse(completion(prompt="a", **{name: 0})).max_tokens == 0
    assert parse(chat(**{name: 1})).max_tokens == 1
    failure = refusal(chat(**{name: 2}))
    assert failure.param == name
    assert "prefill instance" in failure.message
    assert refusal(chat(**{name: -1})).param == name
    assert refusal(chat(**{name: True})).param == name


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1}, {"stream": False}, {"stop": None}, {"stop": []}, {"user": "u"}, {"store": True},
        {"metadata": {"a": "b"}}, {"frequency_penalty": 0.0}, {"echo": False}, {"tools": None},
        {"best_of": 1}, {"logit_bias": {}}, {"response_format": {"type": "text"}},
    ],
)  # fmt: skip
def test_parameters_that_ask_for_nothing(neutral: dict[str, Any]) -> None:
    parse(completion(prompt="a", **neutral))
    parse(chat(**neutral))


@pytest.mark.parametrize(
    "refused",
    [
        {"n": 2}, {"n": True}, {"stream": True}, {"stop": "x"}, {"stop": ["x"]}, {"tools": [{}]},
        {"frequency_penalty": 0.1}, {"logit_bias": {"5": 1}}, {"best_of": 2}, {"echo": True},
        {"response_format": {"type": "json_object"}}, {"min_p": 0.1}, {"guided_json": {}},
        {"suffix": "x"}, {"made_up": 1}, {"made_up": None}, {"top_p": 0}, {"top_p": 1.1},
        {"temperature": -1}, {"temperature": "1"}, {"temperature": 1e9}, {"top_k": -2},
        {"seed": 0.5}, {"seed": 2**70}, {"prompt_logprobs": 21}, {"prompt_logprobs": True},
        {"model": 5},
    ],
)  # fmt: skip
def test_parameters_that_are_refused_by_name(refused: dict[str, Any]) -> None:
    (name,) = refused
    for document in (completion(prompt="a", **refused), chat(**refused)):
        failure = refusal(document)
        assert failure.param == name
        assert name in failure.message


def test_echo_points_at_prompt_logprobs() -> None:
    assert "prompt_logprobs" in refusal(completion(prompt="a", echo=True)).message


def test_logprobs_of_completions() -> None:
    assert parse(completion(prompt="a")).logprobs is None
    assert parse(completion(prompt="a"), logprobs=3, prompt_logprobs=2).logprobs == 3
    assert parse(completion(prompt="a"), prompt_logprobs=2).prompt_logprobs == 2
    assert parse(completion(prompt="a", logprobs=0), logprobs=3).logprobs == 0
    assert parse(completion(prompt="a", prompt_logprobs=0), prompt_logprobs=3).prompt_logprobs == 0
    for wrong in (True, 21, -1, "3"):
        assert refusal(completion(prompt="a", logprobs=wrong)).param == "logprobs"


def test_logprobs_of_chats() -> None:
    assert parse(chat()).logprobs is None
    assert parse(chat(), logprobs=3).logprobs == 3
    assert parse(chat(logprobs=True)).logprobs == 0
    assert parse(chat(logprobs=True, top_logprobs=4)).logprobs == 4
    assert parse(chat(logprobs=False), logprobs=3).logprobs is None
    assert refusal(chat(logprobs=3)).param == "logprobs"
    assert refusal(chat(top_logprobs=3)).param == "top_logprobs"
    assert refusal(chat(logprobs=False, top_logprobs=3)).param == "top_logprobs"


def test_sampling() -> None:
    assert parse(completion(prompt="a", top_p=0.5, seed=3)).sampling.temperature == 0
    drawn = parse(completion(prompt="a", temperature=1, top_p=0.5, top_k=-1, seed=3)).sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed) == (1, 0.5, 0, 3)


def test_the_seed_of_a_line_that_gives_none_is_its_own_and_stays() -> None:
    first = parse({"id": "a", "prompt": "x", "temperature": 1}).sampling.seed
    assert parse({"id": "a", "prompt": "x", "temperature": 1}).sampling.seed == first
    assert parse({"id": "b", "prompt": "x", "temperature": 1}).sampling.seed != first


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = parse({"messages": [{"role": "user", "content": parts}]})
    assert bytes(prompt.token_ids) == b"user:a\nb\nassistant:"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"), ({"content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(message: dict[str, Any], param: str) -> None:
    assert refusal({"messages": [message]}).param == param


def test_empty_messages() -> None:
    assert refusal({"messages": []}).code == "empty_prompt"
    assert refusal({"messages": "hi"}).param == "messages"
    assert refusal({"messages": ["hi"]}).param == "messages"


def test_a_checkpoint_without_tokenizer_or_template() -> None:
    bare = Tokenizer("no tokenizer.json", ChatTemplate("", {}))
    assert refusal({"prompt": "a"}, bare).code == "no_tokenizer"
    assert refusal({"messages": [{"role": "user", "content": "a"}]}, bare).code == "no_tokenizer"
    assert parse({"prompt_token_ids": [5]}, bare).token_ids == [5]
    no_template = Tokenizer(ByteCodec(), "this checkpoint has no chat template")
    failure = refusal({"messages": [{"role": "user", "content": "a"}]}, no_template)
    assert "no chat template" in failure.message


def test_a_template_that_refuses_or_breaks() -> None:
    for template in ("{{ raise_exception('no system role') }}", "{{ messages[5].content }}"):
        failure = refusal(
            {"messages": [{"role": "user", "content": "a"}]}, byte_tokenizer(template)
        )
        assert (failure.code, failure.param) == ("chat_template", "messages")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"id": "a", "prompt": "x\\ud800"}', "unpaired surrogate \\ud800 in prompt"),
        ('{"id": "a", "prompt": "\\udc00y"}', "unpaired surrogate \\udc00 in prompt"),
        ('{"id": "a", "messages": [{"content": "\\ud83dx"}]}', "\\ud83d in messages[0].content"),
        ('{"id": "a", "prompt": "p", "\\ud83d": 1}', '\\ud83d in the key "\\ud83d"'),
    ],
)
def test_an_unpaired_surrogate_is_named_and_the_line_keeps_its_id(text: str, where: str) -> None:
    origin, failure = read_line(line(text.encode(), number=7))
    assert isinstance(failure, RequestError)
    assert (origin.custom_id, failure.code) == ("a", "unpaired_surrogate")
    assert where in failure.message


def test_an_id_with_an_unpaired_surrogate_cannot_be_kept() -> None:
    origin, failure = read_line(line(b'{"id": "\\ud800", "prompt": "a"}', number=7))
    assert isinstance(failure, RequestError)
    assert (origin.custom_id, failure.code) == ("line-7", "unpaired_surrogate")
    origin, failure = read_line(line(b'{"id": "a", "prompt": "\\ud83d\\ude00"}'))
    assert failure == {"id": "a", "prompt": "\U0001f600"}


def test_every_parameter_at_fault_is_named() -> None:
    failure = refusal(
        completion(prompt="a", made_up=1, n=2, logprobs=25, max_tokens=5, stream=True, other=None)
    )
    assert (failure.param, failure.code) == ("made_up", "unknown_parameter")
    for words in (
        'unknown parameter "made_up"',
        "n: 2 is refused",
        "logprobs must be a whole number from 0 to 20, not 25",
        "max_tokens is 5",
        "stream: true is refused",
        'unknown parameter "other"',
    ):
        assert words in failure.message
    both = refusal({"custom_id": "a", "url": "/v1/completions", "x": 1, "y": 2, "body": {}})
    assert 'unknown "x", "y" beside body' in both.message


@pytest.mark.parametrize(
    ("document", "message", "code"),
    [
        (completion(prompt="a", logprobs="5"),
         'logprobs must be a whole number from 0 to 20, not "5"', "invalid_type"),
        (completion(prompt="a", logprobs=21),
         "logprobs must be a whole number from 0 to 20, not 21", "invalid_value"),
        (completion(prompt="a", max_tokens=-1),
         "max_tokens must be a whole number of at least 0, not -1", "invalid_value"),
        (completion(prompt="a", top_p=0),
         "top_p must be a number above 0 and at most 1, not 0", "invalid_value"),
        (completion(prompt="a", return_token_ids=1),
         "return_token_ids must be true or false, not 1", "invalid_type"),
        (completion(prompt_token_ids=[1, "a"]),
         "prompt_token_ids[1] must be a whole number, not a string", "invalid_type"),
        (completion(prompt_token_ids="a"),
         'prompt_token_ids must be an array of whole numbers, not "a"', "invalid_type"),
        (completion(prompt="a", tools=[{"a": None}]), 'tools: [{"a": null}] is refused',
         "unsupported_parameter"),
        (completion(prompt="a") | {"url": None},
         'url is missing; it must be "/v1/completions" or "/v1/chat/completions"', "invalid_url"),
        (completion(prompt="a") | {"method": "GET"}, 'method must be "POST", not "GET"',
         "invalid_method"),
        (completion(prompt="a") | {"body": None}, "body is missing", "invalid_type"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
          "body": {"prompt": "a"}},
         'unknown parameter "prompt": a chat takes messages; send a prompt to /v1/completions',
         "unknown_parameter"),
        (completion(messages=[]), "send messages to /v1/chat/completions", "unknown_parameter"),
        ({"id": True, "prompt": "a"}, "id must be a string that is not empty, not true",
         "invalid_type"),
    ],
)  # fmt: skip
def test_messages_are_in_plain_words(document: Any, message: str, code: str) -> None:
    failure = refusal(document)
    assert message in failure.message
    assert failure.code == code


def test_whole_numbers_may_have_a_point() -> None:
    prompt = parse(completion(prompt="a", max_tokens=1.0, logprobs=3.0, temperature=1))
    assert (prompt.max_tokens, prompt.logprobs, prompt.sampling.temperature) == (1, 3, 1.0)
    assert refusal(completion(prompt="a", max_tokens=0.5)).code == "invalid_type"


def test_prompts_can_be_had_back_as_token_ids() -> None:
    assert not parse(completion(prompt="a")).return_token_ids
    assert not parse(completion(prompt="a", return_token_ids=None)).return_token_ids
    assert parse(chat(return_token_ids=True)).return_token_ids


LONG = "x" * 10**6


@pytest.mark.parametrize(
    "document",
    [
        completion(prompt="a", **{LONG: 1}),
        completion(prompt="a", made_up=LONG),
        completion(prompt="a", n=LONG),
        completion(prompt="a", stop=[LONG] * 5),
        completion(prompt="a", logprobs=LONG),
        completion(prompt="a", max_tokens=int("9" * 18)),
        completion(prompt="a", model=LONG),
        completion(prompt="a", **{f"unknown_{i}": 1 for i in range(5000)}),
        completion(prompt="a") | {LONG: 1},
        completion(prompt="a") | {f"unknown_{i}": 1 for i in range(5000)},
        completion(prompt="a") | {"url": LONG},
        completion(prompt="a") | {"method": LONG},
        completion(prompt="a") | {"body": [LONG]},
        completion(prompt="a") | {"custom_id": [LONG]},
        {"prompt": "a", "id": {LONG: LONG}},
        {LONG: 1},
        {"prompt": "a", LONG: {}},
        {"messages": [{"role": "user", "content": "a", LONG: 1}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        {"messages": [{"role": {LONG: 1}, "content": "a"}]},
        {"prompt": "a", "chat_template_kwargs": LONG},
        b'{"prompt": {"' + LONG.encode() + b'": "\\ud800"}}',
        b'{"' + LONG.encode() + b'\\ud800": 1}',
        b"[" + b"{" * 100 + LONG.encode(),
        b'{"prompt": [' + b"9" * 5000 + b"]}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        LONG.encode(),
    ],
    ids=range(27),
)
def test_no_error_gives_back_what_was_sent(document: Any) -> None:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    origin, content = read_line(line(data, number=7))
    failure = content
    if not isinstance(content, RequestError):
        with pytest.raises(RequestError) as caught:
            parser().parse(origin, *split_form(content))
        failure = caught.value
    assert isinstance(failure, RequestError)
    assert len(writer().failure(origin, failure)) < 5000
    assert len(failure.message) <= 1000
    assert len(failure.param or "") <= 80


@pytest.mark.parametrize("key", ["id", "custom_id"])
def test_an_id_that_is_too_long_is_refused(key: str) -> None:
    assert parse({key: "x" * 512, "prompt": "a"}).origin.custom_id == "x" * 512
    origin, failure = read_line(line(json.dumps({key: LONG, "prompt": "a"}).encode(), number=7))
    assert isinstance(failure, RequestError)
    assert (origin.custom_id, failure.param) == ("line-7", key)
    assert "1000000 characters; at most 512" in failure.message


def test_the_template_s_words_are_cut() -> None:
    failure = refusal(
        {"messages": [{"role": "user", "content": LONG}]},
        byte_tokenizer("{{ raise_exception(messages[0].content) }}"),
    )
    assert len(failure.message) < 300


def test_a_text_that_is_far_too_long_is_refused_like_one_that_is_too_long() -> None:
    for document, param in (
        ({"prompt": LONG}, "prompt"),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ):
        failure = refusal(document)
        assert (failure.code, failure.param) == ("context_length_exceeded", param)
        assert "max_model_len, which is 50 tokens" in failure.message
