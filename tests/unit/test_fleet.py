"""Several instances behind one HTTP server: who gets what, and what becomes of it when one goes."""

import concurrent.futures
import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine.control.messages import PrefillRequest, PrefillResult, Refused
from engine.model.architecture import Latent
from engine.model.config import load_config
from engine.model.work import prefill_flops
from engine.schedule.cost import PromptCost
from engine.serve.notices import InstanceBack, InstanceLost
from engine.serve.spec import KvFolder, prompt_cost
from helpers.checkpoints import checkpoint
from helpers.serving import HEALTHY, Server, served, wait_until


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is said is heard soon, and nobody is given up, however slow the machine."""
    monkeypatch.setattr("engine.serve.fleet._WATCH_S", 0.02)
    monkeypatch.setattr("engine.serve.fleet._SILENT", 10_000)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed after half a second."""
    monkeypatch.setattr("engine.serve.fleet._WATCH_S", 0.1)


@pytest.fixture
def two(tmp_path: Path, watched: None) -> Iterator[Server]:
    with served(tmp_path, instances=2) as server:
        wait_for_all(server)
        yield server


@pytest.fixture
def impatient(tmp_path: Path, quick: None) -> Iterator[Server]:
    with served(tmp_path, instances=2) as server:
        wait_for_all(server)
        yield server


def wait_for_all(server: Server) -> None:
    members = server.front.fleet.members
    wait_until(lambda: all(member.welcoming for member in members), "every instance is known")


def ask(pool: ThreadPoolExecutor, server: Server, prompt: Any, **more: Any) -> Future[Any]:
    return pool.submit(server.post, "/v1/completions", prompt=prompt, **more)


def counts(server: Server) -> list[int]:
    return [len(controller.requests) for controller in server.controllers]


def hold(server: Server, *held: int) -> None:
    for index in held:
        server.controllers[index].holds = True


def assert_nothing_left(server: Server) -> None:
    members = server.front.fleet.members
    wait_until(lambda: not any(member.jobs for member in members), "all is answered")
    assert [member.work for member in members] == [0] * len(members)


# --- who gets what ----------------------------------------------------------------------------


def test_a_prompts_cost_is_linear_and_quadratic_and_knows_windows() -> None:
    assert [PromptCost().of(n) for n in (1, 10, 1000)] == [1, 10, 1000]
    assert PromptCost(pair=0.01).of(1000) == 1000 + 5000
    windowed = PromptCost(pair=0.01, window=100)
    assert windowed.of(100) == PromptCost(pair=0.01).of(100) == 150
    assert windowed.of(1000) == 1000 + 50 + 900
    assert PromptCost(pair=1e-9).of(1) == 1


def test_a_models_operations() -> None:
    config = load_config(checkpoint("qwen3_moe"))
    attention = 32 * (64 + 32 + 32) + 64 * 32  # queries, keys, values; and back
    router, experts = 8 * 32, 2 * (3 * 32 * 24)
    assert prefill_flops(config) == (
        2 * 3 * (attention + router + experts),
        3 * 2 * (4 * (16 + 16)),  # layers; heads, for the score and for the value
    )
    latent = load_config(checkpoint("deepseek_v3"))
    assert isinstance(latent.attention, Latent)
    widths = latent.attention.nope_dim + latent.attention.rope_dim + latent.attention.value_dim
    assert prefill_flops(latent).pair == 2 * latent.attention.heads * widths * latent.layers
    assert prompt_cost(latent).of(1000) > 1000


def test_work_is_weighed_not_requests(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with served(tmp_path, instances=2, cost=PromptCost(pair=0.01)) as server:
        hold(server, 0, 1)
        answers = [ask(pool, server, [65] * 1000)]
        wait_until(lambda: sum(counts(server)) == 1, "the long prompt is there")
        # Ten prompts of 100 tokens are as many tokens, but a quarter of the work.
        answers.append(ask(pool, server, [[66] * 100] * 10))
        wait_until(lambda: sum(counts(server)) == 11, "all are there")
        assert sorted(counts(server)) == [1, 10]
        assert sorted(m.work for m in server.front.fleet.members) == [1500, 6000]
        for controller in server.controllers:
            controller.release()
        assert [answer.result().status_code for answer in answers] == [200, 200]
        assert_nothing_left(server)


def test_the_prompts_of_a_request_are_divided_and_answered_in_order(two: Server) -> None:
    for controller in two.controllers:
        controller.answer = lambda request: PrefillResult(request.key, request.token_ids[-1])
    answer = two.post("/v1/completions", prompt=[[token] for token in range(40, 60)]).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[t] for t in range(40, 60)]
    assert counts(two) == [10, 10]


def test_without_work_they_take_turns(two: Server) -> None:
    for _ in range(6):
        assert two.post("/v1/completions", prompt="hi").status_code == 200
    assert counts(two) == [3, 3]


def test_one_that_is_not_ready_is_spared(two: Server) -> None:
    changed = msgspec.structs.replace(HEALTHY, ready=False)
    two.controllers[0].snapshot = changed
    wait_until(lambda: not two.front.fleet.members[0].welcoming, "that is known")
    two.post("/v1/completions", prompt=["a", "b", "c"])
    assert counts(two) == [0, 3]
    two.controllers[1].snapshot = changed
    wait_until(lambda: not two.front.fleet.members[1].welcoming, "that is known")
    two.post("/v1/completions", prompt=["a", "b", "c", "d"])
    assert sum(counts(two)) == 7
    assert min(counts(two)) == 2


# --- one is lost ------------------------------------------------------------------------------


def test_what_a_lost_instance_had_goes_to_the_others(two: Server, pool: ThreadPoolExecutor) -> None:
    hold(two, 0, 1)
    answers = [ask(pool, two, [[n, 1], [n, 2]]) for n in range(40, 44)]
    wait_until(lambda: sum(counts(two)) == 8, "all are there")
    assert counts(two) == [4, 4]
    two.notify(InstanceLost(0))
    wait_until(lambda: counts(two)[1] == 8, "they have moved")
    assert len({tuple(r.token_ids) for r in two.controllers[1].requests}) == 8
    two.controllers[1].answer = lambda r: PrefillResult(r.key, r.token_ids[0])
    two.controllers[0].answer = lambda r: PrefillResult(r.key, 99)  # nobody listens to it
    for controller in two.controllers:
        controller.release()
    tokens = [[c["token_ids"] for c in a.result().json()["choices"]] for a in answers]
    assert tokens == [[[n], [n]] for n in range(40, 44)]
    assert_nothing_left(two)
    assert two.post("/v1/completions", prompt="hi").status_code == 200
    assert counts(two) == [4, 9]


def test_it_comes_back(two: Server) -> None:
    two.notify(InstanceLost(0))
    wait_until(lambda: two.front.fleet.members[0].gone, "it is known")
    health = two.client.get("/health")
    problems = ["instance 0: the controller does not answer"]
    assert (health.status_code, health.json()) == (
        200, {"status": "degraded", "problems": problems},
    )  # fmt: skip
    assert two.client.get("/ready").status_code == 200
    two.notify(InstanceBack(0))
    wait_for_all(two)
    assert two.client.get("/health").json() == {"status": "ok", "problems": []}
    two.post("/v1/completions", prompt=["a", "b"])
    assert counts(two) == [1, 1]


def test_without_any_instance(two: Server, pool: ThreadPoolExecutor) -> None:
    hold(two, 0, 1)
    held = ask(pool, two, ["a", "b"])
    wait_until(lambda: sum(counts(two)) == 2, "both are there")
    for index in (0, 1, 1, 7):  # said twice, and of none that there is
        two.notify(InstanceLost(index))
    for answer in (held.result(), two.post("/v1/completions", prompt="hi")):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "no_instance"
    assert two.client.get("/health").json()["status"] == "unhealthy"
    for path in ("/health", "/ready"):
        assert two.client.get(path).status_code == 503
    two.notify(InstanceBack(1))
    two.controllers[1].release()
    wait_until(lambda: two.front.fleet.members[1].welcoming, "it is back")
    assert two.post("/v1/completions", prompt="hi").status_code == 200
    assert_nothing_left(two)


def test_one_that_is_silent_is_as_good_as_lost(impatient: Server, pool: ThreadPoolExecutor) -> None:
    impatient.controllers[0].asleep = True
    answers = [ask(pool, impatient, "a"), ask(pool, impatient, "b")]
    assert [answer.result().status_code for answer in answers] == [200, 200]
    assert counts(impatient) == [0, 2]
    assert_nothing_left(impatient)
    # What it was sent and had not read it reads now; its answers are passed over.
    impatient.controllers[0].asleep = False
    wait_until(lambda: impatient.front.fleet.members[0].alive, "it is heard again")
    wait_until(lambda: len(impatient.controllers[0].cancelled) == 1, "it is told to leave it")
    assert impatient.post("/v1/completions", prompt=["a", "b"]).status_code == 200
    assert [m.work for m in impatient.front.fleet.members] == [0, 0]


def test_an_answer_that_comes_late_is_not_taken_for_another(
    impatient: Server, pool: ThreadPoolExecutor
) -> None:
    hold(impatient, 0, 1)
    impatient.controllers[0].runs = True  # it answers what is cancelled too, in the end
    answer = ask(pool, impatient, [[65], [66]])
    wait_until(lambda: counts(impatient) == [1, 1], "both are there")
    impatient.controllers[0].silent = True
    wait_until(lambda: counts(impatient)[1] == 2, "it moves")
    impatient.controllers[0].answer = lambda request: PrefillResult(request.key, 99)
    impatient.controllers[0].release()
    wait_until(lambda: impatient.front.fleet.members[0].alive, "it has answered")
    impatient.controllers[1].answer = lambda request: PrefillResult(
        request.key, request.token_ids[0]
    )
    impatient.controllers[1].release()
    choices = answer.result().json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[65], [66]]
    assert_nothing_left(impatient)


def test_one_instance_alone_may_be_silent(tmp_path: Path, quick: None) -> None:
    with served(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        hold(server, 0)
        server.controller.silent = True
        answer = ask(pool, server, "hi")
        wait_until(lambda: counts(server) == [1], "it is there")
        with pytest.raises(concurrent.futures.TimeoutError):
            answer.result(1.0)  # more than it takes to give up one of several
        server.controller.release()
        assert answer.result().status_code == 200


def test_a_kv_cache_that_may_yet_be_written_is_not_written_twice(
    tmp_path: Path, quick: None, pool: ThreadPoolExecutor
) -> None:
    kv = KvFolder(str(tmp_path / "kv"), max_bytes=10**9, max_age_s=9.0, bytes_per_token=1)
    with served(tmp_path, instances=2, kv=kv) as server:
        wait_for_all(server)
        hold(server, 0, 1)
        wanted = {"do_remote_decode": True}
        answers = [ask(pool, server, text, kv_transfer_params=wanted) for text in ("a", "b")]
        wait_until(lambda: counts(server) == [1, 1], "both are there")
        server.controllers[0].silent = True
        wait_until(lambda: server.front.fleet.members[0].silent, "it is noticed")
        assert counts(server) == [1, 1]
        server.notify(InstanceLost(0))
        wait_until(lambda: counts(server) == [1, 2], "nobody can write it any more")
        server.controllers[1].release()
        assert [answer.result().status_code for answer in answers] == [200, 200]
        assert_nothing_left(server)


def test_what_may_have_ended_three_instances_ends_no_more(
    tmp_path: Path, watched: None, pool: ThreadPoolExecutor
) -> None:
    with served(tmp_path, instances=4) as server:
        wait_for_all(server)
        hold(server, 0, 1, 2, 3)
        answer = ask(pool, server, "poison")
        for _ in range(3):
            members = server.front.fleet.members
            wait_until(lambda m=members: any(x.jobs for x in m), "somebody has it")
            (holder,) = [member.index for member in members if member.jobs]
            server.notify(InstanceLost(holder))
            wait_until(lambda m=members, h=holder: m[h].gone, "it is known")
        assert answer.result().status_code == 500
        assert "3 instances" in answer.result().json()["error"]["message"]
        assert_nothing_left(server)
        assert sorted(counts(server)) == [0, 1, 1, 1]


# --- refusals and clients that leave ----------------------------------------------------------


def refusing(request: PrefillRequest) -> PrefillResult:
    return PrefillResult(request.key, error="stopping", refused=True)


def test_one_that_is_stopping_passes_prompts_on(two: Server) -> None:
    two.controllers[0].answer = refusing
    answer = two.post("/v1/completions", prompt=["a", "b", "c"])
    assert answer.status_code == 200
    assert counts(two)[1] == 3
    two.controllers[1].answer = refusing
    refused = two.post("/v1/completions", prompt=["a", "b"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
    assert_nothing_left(two)


def test_a_refusal_of_one_fails_its_own(two: Server, pool: ThreadPoolExecutor) -> None:
    hold(two, 0, 1)
    first = ask(pool, two, "a")
    wait_until(lambda: sum(counts(two)) == 1, "it is there")
    (holder,) = [i for i, count in enumerate(counts(two)) if count]
    second = ask(pool, two, "b")
    wait_until(lambda: counts(two) == [1, 1], "the other is there")
    two.controllers[holder].say(Refused("another version"))
    assert first.result().status_code == 503
    two.controllers[1 - holder].release()
    assert second.result().status_code == 200


def leaving(server: Server, prompts: int) -> None:
    """A client that has gone once its prompts are submitted."""
    body = msgspec.json.encode({"prompt": [[65]] * prompts})
    before = sum(counts(server))
    with server.raw(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    ):
        wait_until(lambda: sum(counts(server)) == before + prompts, "all are there")


def test_a_client_that_leaves_takes_all_its_prompts_along(two: Server) -> None:
    hold(two, 0, 1)
    leaving(two, 4)
    wait_until(lambda: all(len(c.cancelled) == 2 for c in two.controllers), "all are withdrawn")
    assert_nothing_left(two)
    assert two.front._places.taken == 0


def test_what_nobody_waits_for_does_not_move(two: Server) -> None:
    hold(two, 0, 1)
    for controller in two.controllers:
        controller.runs = True
    leaving(two, 4)
    wait_until(lambda: all(len(c.cancelled) == 2 for c in two.controllers), "all are withdrawn")
    two.notify(InstanceLost(0))
    wait_until(lambda: two.front.fleet.members[0].gone, "it is known")
    two.controllers[1].release()
    assert_nothing_left(two)
    assert counts(two) == [2, 2]


# --- under load -------------------------------------------------------------------------------


def test_nothing_is_lost_and_nothing_doubled_under_load(tmp_path: Path, watched: None) -> None:
    with served(tmp_path, instances=3) as server:
        wait_for_all(server)
        for controller in server.controllers:
            controller.answer = lambda r: PrefillResult(r.key, r.token_ids[0])
        answered: queue.SimpleQueue[list[list[int]]] = queue.SimpleQueue()

        def client(number: int) -> None:
            with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http:
                for turn in range(15):
                    tokens = [(number * 15 + turn + more) % 256 for more in range(3)]
                    prompts = [[token] for token in tokens]
                    answer = http.post("/v1/completions", json={"prompt": prompts})
                    assert answer.status_code == 200
                    got = [choice["token_ids"] for choice in answer.json()["choices"]]
                    assert got == prompts
                    answered.put(got)

        with ThreadPoolExecutor(6) as clients:
            running = [clients.submit(client, number) for number in range(6)]
            for index in (0, 1):  # a third loss is a prompt's last
                done = answered.qsize()
                hold(server, index)
                wait_until(lambda d=done: answered.qsize() > d + 2 or d > 80, "some go on")
                server.notify(InstanceLost(index))
                wait_until(lambda i=index: server.front.fleet.members[i].gone, "lost")
                server.controllers[index].release()
                server.notify(InstanceBack(index))
            for one in running:
                one.result()
        assert answered.qsize() == 90
        assert_nothing_left(server)
