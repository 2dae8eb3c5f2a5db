"""A real instance behind HTTP, as clients meet it."""

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

from engine.control.client import Client
from engine.kv.load import load_dynamic_cache
from engine.kv.naming import token_sha256
from engine.launch.running import start_instance
from engine.model.demo import make_demo_checkpoint
from engine.serve.spec import http_spec
from helpers.checkpoints import reference_cache, reference_logits
from helpers.instances import DEADLINE_S, layout, plan, wait_for

TEXT = "The experts answer in the order in which they were asked."


class Served:
    def __init__(self, model_dir: Path, kv_dir: Path, port: int, client: Client) -> None:
        self.model_dir = model_dir
        self.kv_dir = kv_dir
        self.port = port
        self.client = client
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have `labels`."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"{name} ", f"{name}{{"))
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        )

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.post("/tokenize", prompt=text).json()["tokens"]
        return tokens

    def http_process(self) -> psutil.Process | None:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if child.cmdline()[:1] == ["asapctl: http"]:
                    return child
        return None


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)
        model_dir, kv_dir = Path(folder) / "demo", Path(folder) / "kv"
        make_demo_checkpoint(model_dir)
        made = plan(model_dir, layout(2, 2, f'serve.kv_dir="{kv_dir}"'), keep_kv=True)
        port = listener.getsockname()[1]
        spec = http_spec(made, host="127.0.0.1", port=port, api_key=None)
        with start_instance(made, http=spec, listener=listener) as client:
            served = Served(model_dir, kv_dir, port, client)
            with served.http:
                yield served


@pytest.fixture
def openai_client(served: Served) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{served.url}/v1", api_key="-", max_retries=0, http_client=http
        ) as client,
    ):
        yield client


def test_a_completion_is_the_models(served: Served, openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(model="demo", prompt=TEXT, max_tokens=1, logprobs=3)
    ids = served.tokens(TEXT)
    logprobs = torch.log_softmax(reference_logits(served.model_dir, ids)[-1], dim=-1)
    (choice,) = answer.choices
    assert choice.token_ids == [int(logprobs.argmax())]  # type: ignore[attr-defined]
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] == pytest.approx(float(logprobs.max()), abs=1e-4)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


def test_prompt_logprobs_are_the_models(served: Served) -> None:
    ids = served.tokens(TEXT)
    logprobs = torch.log_softmax(reference_logits(served.model_dir, ids), dim=-1)
    answer = served.post("/v1/completions", prompt=ids, prompt_logprobs=0).json()
    none, *rest = answer["choices"][0]["prompt_logprobs"]
    assert none is None
    for position, entry in enumerate(rest):
        token = ids[position + 1]
        expected = float(logprobs[position, token])
        assert entry[str(token)]["logprob"] == pytest.approx(expected, abs=1e-4)


def test_a_streamed_chat(served: Served, openai_client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": TEXT}]
    answer = openai_client.chat.completions.create(model="demo", messages=messages, max_tokens=1)
    stream = openai_client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, last = list(stream)
    assert first.choices[0].delta.content == answer.choices[0].message.content
    assert last.usage == answer.usage


def test_a_batch_and_a_refusal(served: Served, openai_client: openai.OpenAI) -> None:
    ids = [[5, 6, 7], [8, 9], [10]]
    answer = openai_client.completions.create(model="demo", prompt=ids, max_tokens=1)
    tokens = [choice.token_ids[0] for choice in answer.choices]  # type: ignore[attr-defined]
    assert tokens == [int(reference_logits(served.model_dir, p)[-1].argmax()) for p in ids]
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        openai_client.completions.create(model="demo", prompt=[10**6], max_tokens=1)


def test_a_kv_cache_is_kept_and_fetched(served: Served, tmp_path: Path) -> None:
    ids = served.tokens(TEXT)
    answer = served.post(
        "/v1/completions", prompt=ids, kv_transfer_params={"do_remote_decode": True}
    ).json()
    given = answer["kv_transfer_params"]
    assert (given["tokens"], given["token_sha256"]) == (len(ids), token_sha256(ids))
    copy = tmp_path / "cache.safetensors"
    copy.write_bytes(served.http.get(given["url"]).content)
    cache = load_dynamic_cache(copy, served.model_dir)
    expected = reference_cache(served.model_dir, ids)
    torch.testing.assert_close(cache.layers[0].keys, expected.layers[0].keys, atol=1e-5, rtol=0)
    assert served.http.delete(given["url"]).status_code == 200
    assert list(served.kv_dir.iterdir()) == []


def test_a_thousand_at_once(served: Served) -> None:
    async def ask(number: int) -> tuple[bytes, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = json.dumps({"prompt": [number % 200 + 1] * (number % 7 + 1)}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return head[9:12], json.loads(answer)["usage"]["prompt_tokens"]

    async def ask_all() -> list[tuple[bytes, int]]:
        return await asyncio.gather(*(ask(number) for number in range(1000)))

    answers = asyncio.run(ask_all())
    assert answers == [(b"200", number % 7 + 1) for number in range(1000)]


def test_metrics_of_ranks_sum_to_the_totals(served: Served) -> None:
    served.post("/v1/completions", prompt=[5, 6, 7])
    total = served.metric("asapctl_prompt_tokens_total")
    assert total >= 3
    wait_for(
        lambda: served.metric("asapctl_rank_tokens_total", role="attention") == total,
        "the ranks have said what they did",
    )
    assert served.metric("asapctl_ttft_seconds_count") == served.metric(
        "asapctl_prompts_finished_total"
    )


def test_a_client_that_leaves_frees_its_place(served: Served) -> None:
    body = json.dumps({"prompt": [[7] * 500] * 200}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    done = served.metric("asapctl_prompts_finished_total")
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    wait_for(lambda: served.metric("asapctl_http_queue") == 200, "the prompts have their places")
    connection.close()
    wait_for(lambda: served.metric("asapctl_http_queue") == 0, "their places are free")
    assert served.post("/v1/completions", prompt="hi").status_code == 200
    wait_for(
        lambda: (
            served.metric("asapctl_prompts_running") + served.metric("asapctl_prompts_waiting") == 0
        ),
        "nothing of them is left",
    )
    assert served.metric("asapctl_prompts_finished_total") - done < 200


def test_a_killed_http_process_is_started_again(served: Served) -> None:
    served.http.get("/ready")
    before = served.http_process()
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)

    def serves_again() -> bool:
        served.client.receive(0.01)
        after = served.http_process()
        return after is not None and after.pid != before.pid

    wait_for(serves_again, "another has taken its place")
    with httpx.Client(base_url=served.url, timeout=DEADLINE_S, trust_env=False) as fresh:
        assert fresh.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
