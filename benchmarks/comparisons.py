"""What is compared: each policy's layouts, and the load, paced and on the CPU."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import topologies
from benchmarks import models
from benchmarks.contenders import Layout, time_alone
from benchmarks.offered import Load
from engine.hardware.load import load_hardware
from engine.launch.pacing import LABEL
from engine.traffic.lengths import Lognormal

# The fewer layers, the longer each, and the smaller this machine's own share of it; and the more
# of a batch's time asap spends at its ends, where its lanes do not overlap.
_PACED_LAYERS = 3
_PACED_FASTER = 3  # than the table, so that a load lasts many times the target
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


def paced(seconds: float, quick: bool, cache: Path) -> Comparison:
    """D4 E4 against 8 devices that do both, at the paper's costs, lengths and target."""
    model = _paced_model(_PACED_LAYERS, cache)
    hardware = load_hardware("cloudmatrix384")
    scale = hardware.layers / _PACED_LAYERS / _PACED_FASTER
    fixed = (f"paced.scale={scale}", f"schedule.max_wait_ms={_ASAP_WAIT_MS / _PACED_FASTER}")

    def made(policy: str, groups: int, ranks: int, key: str, *budgets: int) -> list[Layout]:
        sides = (f"attention.groups={groups}", f"experts.ranks={ranks}")
        return [
            Layout(policy, "paced-d4e4", (*sides, f"schedule.{key}={budget}"), model, fixed)
            for budget in budgets[: 1 if quick else None]
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
            "asap": made("asap", 4, 4, "max_batch_tokens", 8192, 16384),
            "sync": made("sync", 8, 8, "max_batch_tokens", 8192, 16384),
            "sync-chunked": made("sync-chunked", 8, 8, "chunk_tokens", 4096, 8192),
            "sync-afd": made("sync-afd", 4, 4, "max_batch_tokens", 8192, 16384),
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

    others = [(1, 1), (1, 2)]
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


def _paced_model(layers: int, cache: Path) -> Path:
    """A folder with the config of paced-d4e4's model, of so many layers."""
    packaged = Path(topologies.__file__).parent / "models" / "paced" / "config.json"
    config = json.loads(packaged.read_text(encoding="utf-8"))
    folder = cache / "models" / f"paced-{layers}"
    folder.mkdir(parents=True, exist_ok=True)
    config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
