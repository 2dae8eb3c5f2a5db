"""Up to where it pays to aggregate prompts."""

from pathlib import Path

import torch

from engine.device.cpu import Cpu
from engine.model.config import load_config
from engine.model.demo import make_demo_checkpoint
from engine.model.loading import load_experts
from engine.schedule.inflection import inflection_point
from engine.schedule.policy import AsapPolicy
from engine.schedule.types import Request
from engine.worker.expert_times import expert_times


def test_a_flat_part_ends_where_the_slope_begins() -> None:
    asked = []

    def seconds(tokens: int) -> float:
        asked.append(tokens)
        return max(1.0, tokens / 1000)

    assert inflection_point(seconds, most=4096) == 1024
    assert asked == [64, 128, 256, 512, 1024, 2048]


def test_without_a_flat_part_the_fewest_do() -> None:
    assert inflection_point(lambda tokens: tokens / 1000, most=4096) == 64
    assert inflection_point(lambda tokens: tokens / 1000, most=10) == 10


def test_it_stays_within_its_bounds() -> None:
    assert inflection_point(lambda _: 1.0, most=300) == 256
    asked = []

    def slow(tokens: int) -> float:
        asked.append(tokens)
        return tokens**0.5

    assert inflection_point(slow, most=4096, budget_s=11.0) == 128
    assert asked == [64, 128]


def test_a_rank_measures_its_experts(tmp_path: Path) -> None:
    make_demo_checkpoint(tmp_path / "demo")
    config = load_config(tmp_path / "demo")
    model = load_experts(tmp_path / "demo", config, torch.float32, range(2, 5), torch.device("cpu"))
    seconds = expert_times(model, torch.float32, Cpu())
    assert 0 < seconds(1) < 60
    assert 0 < seconds(65) < 60


def test_the_policy_takes_what_was_measured() -> None:
    policy = AsapPolicy(1, 1, 1000, 1000, 1000, max_wait_s=10.0)
    policy.add(Request(0, 60, arrival=0.0))
    assert policy.next(now=0.0) == []
    policy.aggregate(50)
    (assignment,) = policy.next(now=0.0)
    assert [segment.key for batch in assignment.batches for segment in batch.segments] == [0]
