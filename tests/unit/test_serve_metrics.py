import msgspec
from prometheus_client.parser import text_string_to_metric_families

from engine.control.messages import RankStatus, Snapshot
from engine.serve.metrics import Metrics
from engine.topology.ranks import RankId


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Value by name and label values, by the labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def rank(role: str, number: int, **more: object) -> RankStatus:
    return RankStatus(RankId(role, number), pid=1, ready=True, **more)  # type: ignore[arg-type]


SNAPSHOT = Snapshot(
    ready=True, waiting=1, running=2, finished=5, failed=1, prompt_tokens=70,
    problems=["expert 0 is stalled"],
    ranks=[
        rank("attention", 0, tokens=30, work_items=2, state="computing"),
        rank("attention", 1, tokens=40, work_items=3, state="dead"),
        rank("expert", 0, tokens=140, queue=4, deaths=2, state="stalled"),
    ],
)  # fmt: skip


def test_the_instance() -> None:
    found = samples(Metrics(7).text([SNAPSHOT], [0]))
    assert found["asapctl_up",] == 1
    assert found["asapctl_prompts_waiting",] == 1
    assert found["asapctl_prompts_running",] == 2
    assert found["asapctl_prompts_finished_total",] == 5
    assert found["asapctl_prompts_failed_total",] == 1
    assert found["asapctl_problems",] == 1
    assert found["asapctl_http_queue_limit",] == 7


def test_ranks_sum_to_the_totals() -> None:
    found = samples(Metrics(7).text([SNAPSHOT], [0]))
    per_rank = {key[1:]: v for key, v in found.items() if key[0] == "asapctl_rank_tokens_total"}
    assert per_rank == {("0", "attention"): 30, ("1", "attention"): 40, ("0", "expert"): 140}
    of_attention = sum(value for (_, role), value in per_rank.items() if role == "attention")
    assert of_attention == found["asapctl_prompt_tokens_total",]


def test_how_ranks_are() -> None:
    found = samples(Metrics(7).text([SNAPSHOT], [0]))
    assert found["asapctl_rank_up", "0", "attention"] == 1
    assert found["asapctl_rank_up", "1", "attention"] == 0
    assert found["asapctl_rank_stalled", "0", "expert"] == 1
    assert found["asapctl_rank_stalled", "0", "attention"] == 0
    assert found["asapctl_rank_queue", "0", "expert"] == 4
    assert found["asapctl_rank_restarts_total", "0", "expert"] == 2


def test_without_a_controller() -> None:
    metrics = Metrics(7)
    metrics.ttft.observe(0.3)
    found = samples(metrics.text([None], [0]))
    assert found["asapctl_up",] == 0
    assert ("asapctl_ready",) not in found
    assert found["asapctl_ttft_seconds_bucket", "0.25"] == 0
    assert found["asapctl_ttft_seconds_bucket", "0.5"] == 1


def test_several_instances_and_their_sums() -> None:
    metrics = Metrics(7, instances=3)
    other = Snapshot(
        ready=False, waiting=3, running=0, finished=2, failed=0, prompt_tokens=9,
        ranks=[rank("expert", 0, tokens=11)],
    )  # fmt: skip
    found = samples(metrics.text([SNAPSHOT, other, None], [30, 1200, 0]))
    assert [found["asapctl_instance_up", i] for i in "012"] == [1, 1, 0]
    assert [found["asapctl_instance_ready", i] for i in "01"] == [1, 0]
    assert ("asapctl_instance_ready", "2") not in found
    assert [found["asapctl_instance_predicted_work", i] for i in "012"] == [30, 1200, 0]
    assert (found["asapctl_up",], found["asapctl_ready",]) == (1, 1)
    assert found["asapctl_problems",] == 2  # one that is said, and one that says nothing
    for name in ("prompts_waiting", "prompts_running"):
        parts = [found[f"asapctl_instance_{name}", i] for i in "01"]
        assert found[f"asapctl_{name}",] == sum(parts)
    assert found["asapctl_prompt_tokens_total",] == 79
    assert found["asapctl_rank_tokens_total", "0", "0", "expert"] == 140
    assert found["asapctl_rank_tokens_total", "1", "0", "expert"] == 11


def test_sums_go_on_when_an_instance_is_lost_and_comes_back() -> None:
    metrics = Metrics(7, instances=2)

    def finished(*numbers: int | None) -> float:
        of = [
            None if n is None else Snapshot(True, 0, 0, finished=n, failed=0, ranks=[])
            for n in numbers
        ]
        return samples(metrics.text(of, [0, 0]))["asapctl_prompts_finished_total",]

    assert finished(5, 7) == 12
    assert finished(None, 8) == 13
    assert finished(0, 8) == 13  # it has been started again
    assert finished(2, 9) == 16
    assert finished(0, 9) == 16


def test_paced_ranks_are_told() -> None:
    note = "paced: waits, by a table"
    text = Metrics(7).text([msgspec.structs.replace(SNAPSHOT, paced=note)], [0])
    assert f"# HELP asapctl_paced 1: {note}\n".encode() in text
    assert samples(text)["asapctl_paced",] == 1
    assert b"paced" not in Metrics(7).text([SNAPSHOT], [0])
