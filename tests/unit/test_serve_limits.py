"""Clients that are too many, too large, too slow, gone, or not allowed; and the others unharmed."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.control.messages import PrefillResult, Refused, Results
from engine.serve.protocol import MAX_HEADER_BYTES
from helpers.offline import ByteCodec, byte_tokenizer
from helpers.serving import Server, served, wait_until

MAX_BODY = 600_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(tmp_path, max_queue=4, max_body_bytes=MAX_BODY, body_timeout_s=0.4) as server:
        yield server


def post_head(length: int | None = None, more: str = "") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{more}"
    return f"{head}{size}\r\n\r\n".encode()


def whole(connection: socket.socket) -> tuple[int, bytes]:
    """Status and all that came, until the server closed the connection."""
    with connection:
        data = b""
        while part := connection.recv(1 << 16):
            data += part
    return int(data.split(b" ", 2)[1]), data


def one_answer(connection: socket.socket) -> bytes:
    """Head and body of an answer to a request, on a connection that stays."""
    data = b""
    while (found := re.search(rb"content-length: (\d+)\r\n(?s:.*)\r\n\r\n", data)) is None or len(
        data
    ) < found.end() + int(found[1]):
        part = connection.recv(1 << 16)
        assert part, f"closed after {data!r}"
        data += part
    return data


def assert_serves(server: Server) -> None:
    assert server.post("/v1/completions", prompt="hi").status_code == 200
    # A place is given back right after its answer.
    wait_until(lambda: server.front._places.taken == 0, "every place is free")
    wait_until(lambda: server.front._bytes.taken == 0, "no body is left")


def hold(server: Server, count: int) -> list[socket.socket]:
    """`count` clients whose prompts the controller does not answer."""
    server.controller.holds = True
    before = len(server.controller.requests)
    body = b'{"prompt": "hi"}'
    clients = [server.raw(post_head(len(body)) + body) for _ in range(count)]
    wait_until(
        lambda: len(server.controller.requests) == before + count, "all prompts are submitted"
    )
    return clients


# --- how many ---------------------------------------------------------------------------------


def test_a_full_queue(server: Server) -> None:
    clients = hold(server, 4)
    refused = server.post("/v1/completions", prompt="hi")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    server.controller.release()
    for client in clients:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.close()
    assert_serves(server)


def test_a_batch_takes_a_place_for_each_prompt(server: Server) -> None:
    clients = hold(server, 2)
    assert server.post("/v1/completions", prompt=["a"] * 3).status_code == 429
    assert server.post("/v1/completions", prompt=["a"] * 5).status_code == 400  # never
    for client in clients:
        client.close()
    server.controller.holds = False
    assert_serves(server)
    assert server.post("/v1/completions", prompt=["a"] * 4).status_code == 200


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    clients = hold(server, 4)
    keys = {request.key for request in server.controller.requests}
    clients[0].close()
    wait_until(lambda: server.front._places.taken == 3, "the place is free")
    wait_until(lambda: len(server.controller.cancelled) == 1, "the prompt is withdrawn")
    assert set(server.controller.cancelled) < keys
    server.controller.release()
    for client in clients[1:]:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.close()
    assert_serves(server)
    text = server.client.get("/metrics").text
    assert 'asapctl_http_requests_total{path="/v1/completions",status="499"} 1.0' in text


def test_answers_to_who_left_and_to_nobody_harm_nothing(server: Server) -> None:
    server.controller.runs = True
    for client in hold(server, 2):
        client.close()
    wait_until(lambda: len(server.controller.cancelled) == 2, "both are withdrawn")
    server.controller.say(Results([PrefillResult(12345, 1)]))
    server.controller.release()
    assert_serves(server)
    wait_until(lambda: not server.front.fleet.members[0].jobs, "nothing is waited for")


def test_a_refusal_by_the_controller_fails_what_waits(server: Server) -> None:
    (client,) = hold(server, 1)
    server.controller.say(Refused("another version"))
    answer = one_answer(client)
    client.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"another version" in answer
    server.controller.release()
    assert_serves(server)


def test_a_thousand_at_once(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.controller.answer = lambda request: PrefillResult(request.key, request.token_ids[0])
        server.controller.holds = True
        answers = asyncio.run(_ask_all(server, 1000))
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [
        [number % 256] for number in range(1000)
    ]


async def _ask_all(server: Server, count: int) -> list[Any]:
    """Answers to `count` prompts, which the controller holds until all of them are there."""
    asked = [asyncio.ensure_future(_ask(server.port, number % 256)) for number in range(count)]
    while len(server.controller.requests) < count and not any(one.done() for one in asked):
        await asyncio.sleep(0.01)
    server.controller.release()
    return await asyncio.gather(*asked)


async def _ask(port: int, token: int) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"prompt": [%d]}' % token
    writer.write(post_head(len(body), "connection: close\r\n") + body)
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 200"), head
    return json.loads(answer)


# --- how much ---------------------------------------------------------------------------------


def test_a_body_that_is_announced_too_large(server: Server) -> None:
    clients = hold(server, 1)
    large = server.client.post(
        "/v1/completions",
        content=b" " * (MAX_BODY + 1),
        headers={"content-type": "application/json"},
    )
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    server.controller.release()
    assert clients[0].recv(1 << 16).startswith(b"HTTP/1.1 200")
    clients[0].close()
    assert_serves(server)


def test_a_client_that_waits_to_be_asked_is_not(server: Server) -> None:
    head = post_head(MAX_BODY + 1, "expect: 100-continue\r\n")
    status, answer = whole(server.raw(head))
    assert status == 413
    assert b"100 Continue" not in answer


def test_a_body_that_grows_too_large(server: Server) -> None:
    connection = server.raw(post_head(None))
    part = b"%x\r\n%b\r\n" % (100_000, b" " * 100_000)
    for _ in range(MAX_BODY // 100_000 + 1):
        connection.sendall(part)
    connection.sendall(b"0\r\n\r\n")
    assert whole(connection)[0] == 413
    assert_serves(server)


def test_bodies_may_not_fill_the_memory(server: Server) -> None:
    clients = [server.raw(post_head(MAX_BODY - 1)) for _ in range(8)]
    wait_until(lambda: server.front._bytes.taken > 7 * MAX_BODY, "all are being read")
    assert server.post("/v1/completions", prompt="a" * 1000).status_code == 429
    for client in clients:
        client.close()
    wait_until(lambda: server.front._bytes.taken == 0, "all have been given up")
    assert_serves(server)


def test_a_long_body_does_not_keep_others_waiting(tmp_path: Path) -> None:
    """While a body is tokenised, slowly, a probe is answered."""

    class SlowCodec(ByteCodec):
        tokenising = False
        may_end = False

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            if len(text) > 100:
                self.tokenising = True
                wait_until(lambda: self.may_end, "the test lets it end")
            return super().encode(text, add_special_tokens)

    codec = SlowCodec()
    tokenizer = byte_tokenizer()
    tokenizer._codec = codec
    body = b'{"prompt": "%b"}' % (b"a" * 100_000)
    with served(tmp_path, tokenizer) as server:
        connection = server.raw(post_head(len(body)) + body)
        wait_until(lambda: codec.tokenising, "it is being tokenised")
        assert server.client.get("/health").status_code == 200
        assert server.post("/v1/completions", prompt="hi").status_code == 200
        codec.may_end = True
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.close()
        assert len(server.controller.requests[-1].token_ids) == 100_001


# --- how slow ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
        post_head(100) + b'{"prompt": ',
        post_head(None) + b"3\r\n   \r\n",
    ],
)
def test_a_slow_client(server: Server, sent: bytes) -> None:
    begun = time.monotonic()
    slow = server.raw(sent)
    assert server.post("/v1/completions", prompt="hi").status_code == 200
    status, answer = whole(slow)
    assert status == 408
    assert b'"invalid_request_error"' in answer
    assert time.monotonic() - begun >= 0.4
    assert_serves(server)


def test_a_dripping_client(server: Server) -> None:
    """Every byte comes soon, but there is no end of them."""
    slow = server.raw(b"GET /health HTTP/1.1\r\n")
    slow.settimeout(0.02)
    for _ in range(200):
        try:
            slow.sendall(b"a")
            if slow.recv(1 << 16):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        pytest.fail("the connection stayed open")
    slow.close()
    assert_serves(server)


def test_endless_headers(server: Server) -> None:
    slow = server.raw(b"GET /health HTTP/1.1\r\nx: " + b"a" * (MAX_HEADER_BYTES + 1))
    assert whole(slow)[0] == 431
    assert_serves(server)


@pytest.mark.parametrize("body", [b"", b"{}"])
@pytest.mark.parametrize(("headers", "status"), [(60, 400), (70, 431)])
def test_large_headers_that_come_at_once(
    server: Server, body: bytes, headers: int, status: int
) -> None:
    """The first are large, but not too large."""
    more = "".join(f"x-{number}: {'a' * 1000}\r\n" for number in range(headers))
    head = post_head(len(body), f"connection: close\r\n{more}")
    assert whole(server.raw(head + body))[0] == status
    assert_serves(server)


def test_an_unread_body_ends_the_connection(server: Server) -> None:
    connection = server.raw(post_head(1000).replace(b"/v1/completions", b"/nothing"))
    assert whole(connection)[0] == 404


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http(server: Server, garbage: bytes) -> None:
    status, answer = whole(server.raw(garbage))
    assert status == 400
    assert b'{"error"' in answer
    assert_serves(server)


def test_connections_are_kept(server: Server) -> None:
    body = b'{"prompt": "hi"}'
    connection = server.raw(post_head(len(body)) + body)
    assert b"200 OK" in one_answer(connection)
    time.sleep(0.5)  # longer than a client may take for its headers, but this is between requests
    connection.sendall(post_head(len(body)) + body)
    assert b"200 OK" in one_answer(connection)
    connection.close()


# --- who --------------------------------------------------------------------------------------


def test_an_api_key(tmp_path: Path) -> None:
    with served(tmp_path, api_key="sécret") as server:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sécret"}):
            encoded = {key: value.encode() for key, value in header.items()}
            for path in ("/v1/completions", "/tokenize", "/v1/models", "/v1/kv/a", "/nothing"):
                refused = server.client.request("POST", path, json={}, headers=encoded)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/metrics"):
            assert server.client.get(path).status_code == 200
        key = {"authorization": "bearer sécret".encode()}
        allowed = server.client.post("/v1/completions", json={"prompt": "hi"}, headers=key)
        assert allowed.status_code == 200


def test_an_error_of_ours_tells_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr("engine.serve.front.parse_request", broken)
        failed = server.post("/v1/completions", prompt="hi")
    assert failed.status_code == 500
    assert failed.json()["error"]["type"] == "server_error"
    assert "secret" not in failed.text
    assert_serves(server)
