"""Two real instances behind one HTTP server; one of them is killed under load."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from engine.control.client import Client
from engine.launch.registry import list_instances
from engine.model.config import load_config
from engine.serve.front import Front
from engine.serve.spec import prompt_cost
from helpers.checkpoints import checkpoint, token_ids
from helpers.instances import instance, layout, wait_for
from helpers.offline import byte_tokenizer
from helpers.serving import running, spec

CLIENTS, EACH = 4, 12


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def zygote_of(client: Client) -> psutil.Process:
    """The process that all others of the instance descend from, and die with."""
    snapshot = client.fresh_snapshot(30.0)
    assert snapshot is not None
    above = psutil.Process(snapshot.ranks[0].pid).parents()
    return next(process for process in above if process.ppid() == os.getpid())


def test_no_request_is_lost_with_an_instance(
    runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.serve.fleet._WATCH_S", 0.5)
    model_dir = checkpoint("qwen3_moe")
    with instance(model_dir, layout(1, 1)) as first, instance(model_dir, layout(1, 2)) as second:
        addresses = [record.controller for record in list_instances()]
        assert len(addresses) == 2
        config = load_config(model_dir)
        made = spec(controllers=addresses, vocab_size=config.vocab_size, cost=prompt_cost(config))
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            running(Front(made, byte_tokenizer()), listener) as url,
        ):
            _load(url, first, second)


def _load(url: str, first: Client, second: Client) -> None:
    prompts = [token_ids(20 + number) for number in range(CLIENTS * EACH)]
    done = threading.Semaphore(0)

    def ask(http: httpx.Client, prompt: list[int]) -> list[int]:
        answer = http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 200, answer.text
        done.release()
        token: list[int] = answer.json()["choices"][0]["token_ids"]
        return token

    def client(number: int) -> list[list[int]]:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            return [ask(http, prompt) for prompt in prompts[number::CLIENTS]]

    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        wait_for(lambda: http.get("/health").json()["status"] == "ok", "both are there")
        expected = [ask(http, prompt) for prompt in prompts]
        for one in (first, second):  # both took part
            snapshot = one.fresh_snapshot(30.0)
            assert snapshot is not None
            assert snapshot.finished > 0
        zygote = zygote_of(first)
        for _ in prompts:
            done.acquire()
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(client, number) for number in range(CLIENTS)]
            for _ in range(CLIENTS):  # under way
                done.acquire()
            zygote.send_signal(signal.SIGKILL)
            answers = [one.result() for one in running]
        for number, mine in enumerate(answers):
            assert mine == expected[number::CLIENTS]
        wait_for(lambda: http.get("/health").json()["status"] == "degraded", "one is missed")
        assert http.get("/ready").status_code == 200
