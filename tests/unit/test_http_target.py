"""Load over HTTP: what is sent, what is made of answers, and how endpoints are asked."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from engine.bench.endpoint import Endpoint, find_endpoint
from engine.bench.http_client import HttpClient, parse_url
from engine.bench.http_target import HttpTarget, settled, vocabulary_of
from engine.errors import RunError, UsageError
from helpers.endpoints import ONE_TOKEN, FakeEndpoint, fake_endpoint

T = TypeVar("T")


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as endpoint:
        yield endpoint


def use(fake: FakeEndpoint, work: Callable[[HttpClient], Awaitable[T]], **headers: str) -> T:
    async def run() -> T:
        client = HttpClient(parse_url(fake.url), headers)
        try:
            return await work(client)
        finally:
            client.close()

    return asyncio.run(run())


def send(
    fake: FakeEndpoint, *, keys: int = 1, tokens: int = 5, vocab_size: int | None = 50
) -> None:
    async def work(client: HttpClient) -> None:
        target = HttpTarget(client, "m", vocab_size, [7])
        for key in range(keys):
            await target.first_token(key, tokens)

    use(fake, work)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1/", "http://host"),
        ("https://host:443/a/v1", "https://host/a"),
        ("https://host:80", "https://host:80"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert parse_url(text).url == url


@pytest.mark.parametrize(
    "text", ["", "ftp://x", "http://", "http://x:99999", "http://x?a=b", "http://me@x", "http://é"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_url(text)


def test_a_prompt_is_random_ids_and_asks_for_one_token(fake: FakeEndpoint) -> None:
    send(fake, keys=2, tokens=30)
    first, second = (asked.body for asked in fake.asked)
    assert first.keys() == {"model", "prompt", "max_tokens", "temperature"}
    assert (first["model"], first["max_tokens"]) == ("m", 1)
    assert (len(first["prompt"]), len(second["prompt"])) == (30, 30)
    assert set(first["prompt"]) <= set(range(4, 50))
    assert first["prompt"] != second["prompt"]
    send(fake, tokens=30)
    assert fake.prompts[2] == first["prompt"]


def test_prompts_of_text(fake: FakeEndpoint) -> None:
    send(fake, tokens=9, vocab_size=None)
    (text,) = fake.prompts
    assert len(text.split()) == 9


def test_a_connection_is_used_again(fake: FakeEndpoint) -> None:
    send(fake, keys=3)
    assert len({asked.connection for asked in fake.asked}) == 1


def test_prompts_at_the_same_time_have_a_connection_each(fake: FakeEndpoint) -> None:
    async def work(client: HttpClient) -> None:
        target = HttpTarget(client, "m", 50, [0])
        await asyncio.gather(*(target.first_token(key, 3) for key in range(20)))

    use(fake, work)
    assert len({asked.connection for asked in fake.asked}) == 20


def test_a_connection_that_the_server_closed_is_replaced(fake: FakeEndpoint) -> None:
    fake.complete = lambda body: b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"choices": [{}]}'
    send(fake, keys=2)
    assert len({asked.connection for asked in fake.asked}) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((429, {"error": {"message": "too many\nprompts"}}), "HTTP 429: too many prompts"),
        ((422, {"detail": "no"}), "HTTP 422: no"),
        ((500, {"object": "error", "message": "broken"}), "HTTP 500: broken"),
        ((502, []), "HTTP 502: []"),
        ((200, {"choices": []}), "no completion: HTTP 200"),
        ((200, {"text": "x"}), "no completion: HTTP 200"),
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP"),
        (b"", "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "ended within the answer"),
    ],
)
def test_answers_that_are_none(fake: FakeEndpoint, answer: Any, message: str) -> None:
    fake.complete = lambda body: answer
    with pytest.raises(RunError, match=re.escape(message)):
        send(fake)


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.0 200 OK\r\n\r\n{"choices": [{}]}',
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'11\r\n{"choices": [{}]}\r\n0\r\n\r\n',
    ],
)
def test_answers_of_other_shapes(fake: FakeEndpoint, answer: bytes) -> None:
    fake.complete = lambda body: answer
    send(fake, keys=2)


def test_nobody_listens() -> None:
    client = HttpClient(parse_url("http://127.0.0.1:9"))
    with pytest.raises(RunError, match=r"^cannot connect to http://127\.0\.0\.1:9: Connection ref"):
        asyncio.run(client.request("GET", "/"))


def test_who_leaves_closes_the_connection(fake: FakeEndpoint) -> None:
    async def work(client: HttpClient) -> None:
        task = asyncio.ensure_future(client.request("POST", "/v1/completions", b"{}"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client._idle == []

    use(fake, work)


def test_what_an_endpoint_says(fake: FakeEndpoint) -> None:
    note = "paced: waits"
    ours = {"id": "a", "owned_by": "asapctl", "max_model_len": 9, "vocab_size": 7, "paced": note}
    theirs = {"id": "b", "owned_by": "vllm", "max_model_len": 9}
    fake.models = 200, {"data": [ours, theirs]}
    found = use(fake, lambda client: find_endpoint(client, None), Authorization="Bearer k")
    assert found == Endpoint("a", 9, 7, note)
    assert fake.asked[0].authorization == "Bearer k"
    # Elsewhere, the token that is asked for has to fit, too.
    assert use(fake, lambda client: find_endpoint(client, "b")) == Endpoint("b", 8)
    with pytest.raises(UsageError, match="--model c: not served there; what is: a, b"):
        use(fake, lambda client: find_endpoint(client, "c"))


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((404, {}), UsageError, "no OpenAI-compatible endpoint"),
        ((200, {"models": []}), UsageError, "no OpenAI-compatible endpoint"),
        ((401, {"error": {"message": "no key"}}), UsageError, "no key; give --api-key"),
        ((503, {}), RunError, "HTTP 503"),
    ],
)
def test_what_is_no_endpoint(
    fake: FakeEndpoint, answer: Any, kind: type[Exception], message: str
) -> None:
    fake.models = answer
    with pytest.raises(kind, match=message):
        use(fake, lambda client: find_endpoint(client, None))


@pytest.mark.parametrize(
    ("said", "takes", "found"),
    [
        (50, lambda prompt: True, 50),
        (None, lambda prompt: True, 32_000),
        (None, lambda prompt: isinstance(prompt, list) and max(prompt) < 300, 256),
        (50, lambda prompt: isinstance(prompt, str), None),
    ],
)
def test_the_vocabulary_is_found(
    fake: FakeEndpoint, said: int | None, takes: Callable[[Any], bool], found: int | None
) -> None:
    fake.complete = lambda body: (200, ONE_TOKEN) if takes(body["prompt"]) else (400, {})
    endpoint = Endpoint("m", vocab_size=said)
    assert use(fake, lambda client: vocabulary_of(client, endpoint, [0])) == found


def test_an_endpoint_that_takes_no_prompt(fake: FakeEndpoint) -> None:
    fake.complete = lambda body: (400, {"detail": "never"})
    with pytest.raises(UsageError, match="takes no prompts: HTTP 400: never"):
        use(fake, lambda client: vocabulary_of(client, Endpoint("m"), [0]))


def test_waiting_for_a_full_queue(fake: FakeEndpoint) -> None:
    answers: list[Any] = [(429, {}), (503, {}), (200, ONE_TOKEN)]
    fake.complete = lambda body: answers.pop(0)
    use(fake, lambda client: settled(HttpTarget(client, "m", 50, [0])))
    assert answers == []
