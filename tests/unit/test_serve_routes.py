"""What clients ask and get, against a controller that the test plays."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from engine.control.messages import PrefillRequest, PrefillResult, TokenLogprob
from helpers.offline import BOS, EOS, FINGERPRINT, FakeEngine
from helpers.serving import HEALTHY, Server, chunks, served

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("s")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    """The module's server, with a controller as new."""
    controller = shared.controller
    controller.answer, controller.snapshot = FakeEngine.default, HEALTHY
    controller.holds = controller.silent = False
    controller.requests.clear()
    return shared


@pytest.fixture(scope="module")
def client(shared: Server) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{shared.url}/v1", api_key="any", max_retries=0, http_client=http
        ) as client,
    ):
        yield client


def ordinal(request: PrefillRequest) -> PrefillResult:
    """Answers with the prompt's last token."""
    return PrefillResult(request.key, request.token_ids[-1])


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["code"], error["param"]


def test_a_completion(server: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hi", max_tokens=1)
    assert server.controller.requests[0].token_ids == [BOS, *b"hi"]
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.system_fingerprint == FINGERPRINT
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "x", "length")
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4
    }  # fmt: skip


def test_a_chat(server: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=1, logprobs=True, top_logprobs=1
    )
    assert bytes(server.controller.requests[0].token_ids) == b"user:hi\nassistant:"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "x")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    (entry,) = choice.logprobs.content
    assert (entry.token, entry.logprob, len(entry.top_logprobs)) == ("x", -0.5, 1)


def test_the_parameters_reach_the_engine(server: Server) -> None:
    server.post(
        "/v1/completions", prompt=[5, 6], max_tokens=1, temperature=0.5, top_p=0.9, top_k=3, seed=4,
        logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    (request,) = server.controller.requests
    assert (request.token_ids, request.logprobs, request.prompt_logprobs) == ([5, 6], 2, 1)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 3, 4)


def test_unseeded_prompts_differ_in_their_seeds(server: Server) -> None:
    server.post("/v1/completions", prompt=["a", "a"], temperature=1)
    server.post("/v1/completions", prompt=["a", "a"], temperature=1)
    assert len({request.sampling.seed for request in server.controller.requests}) == 4


@pytest.mark.parametrize("prompts", [["ab", "cd"], [[97, 98], [99, 100]], ["ab", [99, 100]]])
def test_a_batch_gives_a_choice_for_each_prompt(
    server: Server, client: openai.OpenAI, prompts: Any
) -> None:
    server.controller.answer = ordinal
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "b"), (1, "d")]
    sent = [request.token_ids for request in server.controller.requests]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, sent))
    assert answer.usage.completion_tokens == 2


def test_prompt_logprobs(server: Server) -> None:
    server.controller.answer = lambda request: PrefillResult(
        request.key, EOS, prompt_logprobs=[None, [TokenLogprob(104, -1.5, 2)]]
    )
    (choice,) = server.post("/v1/completions", prompt="h", prompt_logprobs=0).json()["choices"]
    assert choice["prompt_logprobs"] == [
        None, {"104": {"logprob": -1.5, "rank": 2, "decoded_token": "h"}}
    ]  # fmt: skip
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_a_stream_is_one_chunk_and_the_end(server: Server, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="hi", max_tokens=1, stream=True)
    (chunk,) = list(stream)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == ("x", "length")
    assert chunk.usage is None
    (chat,) = list(
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, stream=True)
    )
    assert chat.object == "chat.completion.chunk"
    assert (chat.choices[0].delta.role, chat.choices[0].delta.content) == ("assistant", "x")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_with_usage(server: Server, path: str) -> None:
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    first, last = chunks(
        server.post(path, stream=True, stream_options={"include_usage": True}, **body)
    )
    assert (first["usage"], last["choices"]) == (None, [])
    assert last["usage"]["completion_tokens"] == 1
    assert first["id"] == last["id"]
    (only,) = chunks(
        server.post(path, stream=True, stream_options={"continuous_usage_stats": True}, **body)
    )
    assert only["usage"] == last["usage"]


def test_a_streamed_chat_has_the_ids_of_its_prompt(server: Server) -> None:
    body = {"messages": MESSAGES, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", **body).json()
    (only,) = chunks(server.post("/v1/chat/completions", stream=True, **body))
    assert only["prompt_token_ids"] == whole["prompt_token_ids"]


def test_a_streamed_batch(server: Server) -> None:
    server.controller.answer = ordinal
    events = chunks(server.post("/v1/completions", prompt=["ab", "cd"], stream=True))
    assert [event["choices"][0]["text"] for event in events] == ["b", "d"]
    assert [event["choices"][0]["index"] for event in events] == [0, 1]


def test_models(client: openai.OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_tokenize(server: Server) -> None:
    assert server.post("/tokenize", model="tiny", prompt="hi", return_token_strs=True).json() == {
        "count": 3,
        "max_model_len": 200_000,
        "tokens": [BOS, *b"hi"],
        "token_strs": ["<s>", "h", "i"],
    }
    without = server.post("/tokenize", prompt="hi", add_special_tokens=False).json()
    assert (without["tokens"], without["token_strs"]) == ([*b"hi"], None)
    chat = server.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    assert bytes(chat["tokens"]) == b"user:hi\n"
    assert error_of(server.post("/tokenize")) == (400, "invalid_prompt", "prompt")
    for path in ("/tokenize", "/v1/completions"):
        too_long = error_of(server.post(path, prompt="x" * 4_000_000))
        assert too_long == (400, "context_length_exceeded", "prompt")
    assert error_of(server.post("/tokenize", prompt=[1])) == (400, "invalid_type", "prompt")
    assert server.controller.requests == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (400, "invalid_prompt", "prompt")),
        ({"prompt": ""}, (400, "empty_prompt", "prompt")),
        ({"prompt": [["a"]]}, (400, "invalid_type", "prompt")),
        ({"prompt": [1, 999]}, (400, "token_out_of_range", "prompt")),
        ({"prompt": ["a", [1, 999]]}, (400, "token_out_of_range", "prompt")),
        ({"prompt": [65] * 200_001}, (400, "context_length_exceeded", "prompt")),
        ({"prompt": "a", "max_tokens": 2}, (400, "prefill_only", "max_tokens")),
        ({"prompt": "a", "max_tokens": "1"}, (400, "invalid_type", "max_tokens")),
        ({"prompt": "a", "n": 2}, (400, "unsupported_parameter", "n")),
        ({"prompt": "a", "wat": 2}, (400, "unknown_parameter", "wat")),
        ({"prompt": "a", "stream": "yes"}, (400, "invalid_type", "stream")),
        ({"prompt": "a", "stream_options": {}}, (400, "invalid_value", "stream_options")),
        (
            {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
            (400, "invalid_type", "stream_options"),
        ),
        ({"prompt": "a", "model": "other"}, (404, "model_not_found", "model")),
        ({"prompt": ["a"] * 2049}, (400, "several_prompts", "prompt")),
        (
            {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}},
            (400, "unsupported_parameter", "kv_transfer_params"),
        ),
    ],
)
def test_refusals(server: Server, body: dict[str, Any], expected: Any) -> None:
    assert error_of(server.post("/v1/completions", **body)) == expected
    assert server.controller.requests == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[]", "invalid_type"),
        (b'"a"', "invalid_type"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        (b'{"prompt": "\\ud800"}', "unpaired_surrogate"),
    ],
)
def test_bodies_that_are_no_object(server: Server, body: bytes, expected: str) -> None:
    headers = {"content-type": "application/json"}
    response = server.client.post("/v1/completions", content=body, headers=headers)
    assert error_of(response)[:2] == (400, expected)


def test_what_is_not_json_is_not_read(server: Server) -> None:
    # What a form on any web page could send to a server on this machine.
    response = server.client.post("/v1/completions", content=b'{"prompt": "a"}')
    assert error_of(response)[:2] == (415, "unsupported_media_type")


@pytest.mark.parametrize("encoding", ["gzip", "identity, gzip", "br"])
def test_what_is_compressed_is_not_read(server: Server, encoding: str) -> None:
    for path in ("/v1/completions", "/tokenize"):
        response = server.client.post(
            path, json={"prompt": "a"}, headers={"content-encoding": encoding}
        )
        assert error_of(response)[:2] == (415, "unsupported_media_type")
        assert encoding in response.json()["error"]["message"]
    plain = {"content-encoding": "Identity"}
    assert server.client.post("/tokenize", json={"prompt": "a"}, headers=plain).status_code == 200


def test_unknown_paths_and_methods(server: Server) -> None:
    assert error_of(server.client.get("/v2/completions"))[:2] == (404, "not_found")
    response = server.client.get("/v1/completions")
    assert error_of(response)[:2] == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert error_of(server.client.get("/docs"))[0] == 404
    slash = server.client.post("/v1/completions/", json={"prompt": "a"})
    assert error_of(slash)[:2] == (404, "not_found")


def test_a_prompt_that_fails(server: Server, client: openai.OpenAI) -> None:
    server.controller.answer = lambda request: PrefillResult(request.key, error="it was too much")
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="tiny", prompt="hi", stream=True)
    assert caught.value.status_code == 500
    assert error_of(server.post("/v1/completions", prompt="hi")) == (500, "prefill_failed", None)


def test_an_instance_that_is_stopping(server: Server) -> None:
    server.controller.answer = lambda request: PrefillResult(
        request.key, error="stopping", refused=True
    )
    response = server.post("/v1/completions", prompt="hi")
    assert error_of(response) == (503, "stopping", None)
    assert response.headers["retry-after"] == "1"


def test_health_and_readiness(server: Server) -> None:
    get = server.client.get
    assert (get("/health").status_code, get("/ready").status_code) == (200, 200)
    problem = "expert 0 is stalled"
    server.controller.snapshot = msgspec.structs.replace(HEALTHY, problems=[problem])
    sick = get("/health")
    assert (sick.status_code, sick.json()["problems"]) == (503, [problem])
    assert get("/ready").status_code == 200
    server.controller.snapshot = msgspec.structs.replace(HEALTHY, ready=False)
    assert (get("/health").status_code, get("/ready").status_code) == (200, 503)
    for path in ("/health", "/ready"):
        head = server.client.head(path)
        assert (head.status_code, head.content) == (get(path).status_code, b"")
        assert head.headers["content-length"] == get(path).headers["content-length"]
    server.controller.snapshot = msgspec.structs.replace(HEALTHY, quitting=True)
    assert get("/ready").status_code == 503


def test_the_controller_knows_it_by_its_process(server: Server) -> None:
    server.post("/v1/completions", prompt="hi")
    assert server.controller.clients == {f"http-{os.getpid()}".encode()}


def test_a_silent_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serve.front._SNAPSHOT_S", 0.05)
    with served(tmp_path) as server:
        server.controller.silent = True
        assert server.client.get("/health").json()["problems"] == ["the controller does not answer"]
        assert server.client.get("/ready").status_code == 503
        metrics = server.client.get("/metrics")
        assert metrics.status_code == 200
        assert "asapctl_up 0.0" in metrics.text


def test_the_model_says_that_it_is_paced(tmp_path: Path, server: Server) -> None:
    note = "paced: waits, by a table"
    with served(tmp_path, paced=note) as paced:
        (model,) = paced.client.get("/v1/models").json()["data"]
        assert (model["paced"], model["vocab_size"]) == (note, paced.front.spec.vocab_size)
    assert "paced" not in server.client.get("/v1/models/tiny").json()
