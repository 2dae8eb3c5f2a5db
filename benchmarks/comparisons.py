"""What is compared: each policy's layouts, and the load, paced and on the CPU."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import models
from benchmarks.contenders import Layout, time_alone
from benchmarks.offered import Load
from engine.hardware.load import load_hardware
from engine.launch.pacing import LABEL
from engine.traffic.lengths import Lognormal

_PACED_LAYERS = 6  # of the model of paced-d4e4
_PACED_FASTER = 5  # than the table: loads last many times the target, and the machine keeps up
_PACED_SLO_S = 5.0  # the paper's
_ASAP_WAIT_MS = 20  # for company


@dataclass(frozen=True)
class Comparison:
    """layouts: of each policy, those to choose from, the likeliest first. first_rate: where to
    begin to look.
    """

    title: str
    notes: tuple[str, ...]
    layouts: dict[str, list[Layout]]
    load: Load
    first_rate: float


def paced(seconds: float, quick: bool) -> Comparison:
    """D4 E4 against 8 devices that do both, at the paper's costs, lengths and target."""
    hardware = load_hardware("cloudmatrix384")
    scale = hardware.layers / _PACED_LAYERS / _PACED_FASTER
    fixed = (f"paced.scale={scale}", f"schedule.max_wait_ms={_ASAP_WAIT_MS / _PACED_FASTER}")
    budgets = (8192,) if quick else (8192, 16384, 4096)

    def made(policy: str, groups: int, ranks: int, key: str) -> list[Layout]:
        sides = (f"attention.groups={groups}", f"experts.ranks={ranks}")
        return [
            Layout(policy, "paced-d4e4", (*sides, f"schedule.{key}={budget}"), fixed=fixed)
            for budget in budgets
        ]

    return Comparison(
        title="Asynchrony, paced: D4 E4 against synchronous D8 E8 on the same 8 devices",
        notes=(
            LABEL,
            f"the table of costs: cloudmatrix384, {hardware.about}",
            f"{_PACED_LAYERS} layers instead of {hardware.layers}, and each takes {scale:.2f} "
            f"times as long: so all times are {_PACED_FASTER} times as short as the table's, the "
            f"target ({_PACED_SLO_S:g} s) too, and rates {_PACED_FASTER} times as high",
            "each device stands for 4 dies",
            "lengths: lognormal, mean 5,000, sigma 1.0, from 31 to 32,768; Poisson arrivals",
        ),
        layouts={
            "asap": made("asap", 4, 4, "max_batch_tokens"),
            "sync": made("sync", 8, 8, "max_batch_tokens"),
            "sync-chunked": made("sync-chunked", 8, 8, "chunk_tokens"),
            "sync-afd": made("sync-afd", 4, 4, "max_batch_tokens"),
        },
        load=Load(
            seconds,
            Lognormal(5000, 1.0, 31, 32768),
            slo_s=_PACED_SLO_S / _PACED_FASTER,
            vocabulary=32000,
        ),
        first_rate=12.0 * _PACED_FASTER,
    )


def on_cpu(seconds: float, quick: bool, cache: Path) -> Comparison:
    """Model a; the target is 10 times what a prompt of the mean length takes by itself."""
    model = models.build("a", cache)

    def made(policy: str, groups: int, ranks: int, *more: str) -> Layout:
        sides = (f"attention.groups={groups}", f"experts.ranks={ranks}")
        return Layout(policy, "cpu", (*sides, *more), model)

    def batches(policy: str, key: str, *tokens: int) -> list[Layout]:
        return [made(policy, 2, 2, f"schedule.{key}={count}") for count in tokens]

    others = [(1, 1), (2, 1), (1, 2)]
    layouts = {
        "asap": [
            *batches("asap", "min_batch_tokens", 512, 2048),
            *(made("asap", *shape, "schedule.min_batch_tokens=512") for shape in others),
        ],
        "sync": batches("sync", "max_batch_tokens", 1024, 4096),
        "sync-chunked": batches("sync-chunked", "chunk_tokens", 512, 2048),
        "sync-afd": [
            *batches("sync-afd", "max_batch_tokens", 1024, 4096),
            *(made("sync-afd", *shape, "schedule.max_batch_tokens=1024") for shape in others),
        ],
    }
    if quick:
        layouts = {policy: found[:1] for policy, found in layouts.items()}
    load = Load(seconds, Lognormal(512, 1.0, 1, 4096), slo_s=math.inf, vocabulary=4096)
    alone = time_alone(layouts["asap"][0], load, tokens=512)
    return Comparison(
        title="Asynchrony on the CPU: model a",
        notes=(
            f"target: {10 * alone:.3f} s, 10 times a prompt of 512 tokens alone ({alone:.3f} s)",
            "lengths: lognormal, mean 512, sigma 1.0, at most 4,096; Poisson arrivals",
        ),
        layouts=layouts,
        load=replace(load, slo_s=10 * alone),
        first_rate=1 / alone,
    )
