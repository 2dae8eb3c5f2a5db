"""Does cost grow with the work alone? By the number of prompts, and by their length.

    python -m benchmarks.growth [--counts 100,1000,10000,50000] [--quick]

- By number: `asapctl prefill` on a file of so many prompts, lognormal lengths (mean 128, sigma 1.0,
  at most 1,024), with the demo model: tokens/s without loading, and the most memory of all
  processes together. It is the same work a prompt, so both should stay as they are.
- By length: rounds of prompts of one length. Beside it attention's own curve: what attention alone
  takes in plain processes on the same cores, plus, for each token, what all else takes (one number
  for the whole table, by least squares of the relative differences).
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks import models, programs, report
from benchmarks.plain import PlainProcesses, engine_batches, least_batch
from engine.bench.rounds import run_round
from engine.bench.workload import random_prompts
from engine.launch.checks import plan_of
from engine.launch.running import start_instance
from engine.offline.job import window_of
from engine.traffic.lengths import parse_lengths

_COUNTS = (100, 1_000, 10_000, 50_000)
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS_SPEC = "lognormal:mean=128,sigma=1.0,max=1024"
_VOCABULARY = 256  # the demo model's, and every larger one's
_SAMPLE_S = 0.5


def by_number(counts: list[int], model: str, rounds: int) -> str:
    rows = []
    with tempfile.TemporaryDirectory() as folder, programs.private_runtime() as environment:
        for count in counts:
            source = Path(folder) / f"{count}.jsonl"
            tokens = _write(source, count)
            # A short run says little by itself; a long one needs no repetition.
            found = [
                _prefill(source, model, environment) for _ in range(1 if count > 1000 else rounds)
            ]
            source.unlink()
            rows.append(
                {
                    "prompts": f"{count:,}",
                    "tokens": f"{tokens:,}",
                    "tokens/s": report.median_range([speed for speed, _ in found]),
                    "most memory MiB": report.median_range([size / 2**20 for _, size in found]),
                }
            )
    return report.table(rows)


def _write(path: Path, count: int) -> int:
    """Returns how many tokens it wrote."""
    lengths = parse_lengths(_LENGTHS_SPEC).sample(random.Random(0), count)
    with path.open("w", encoding="ascii") as file:
        for number, length in enumerate(lengths):
            (prompt,) = random_prompts([length], _VOCABULARY, seed=number)
            file.write(json.dumps({"id": str(number), "prompt_token_ids": prompt}) + "\n")
    return sum(lengths)


def _prefill(source: Path, model: str, environment: dict[str, str]) -> tuple[float, int]:
    """tokens/s, and the most memory in bytes."""
    output = source.with_suffix(".results.jsonl")
    arguments = ["prefill", str(source), "-o", str(output), "--overwrite", "--json"]
    process = programs.started([*arguments, "--model", model], environment)
    with programs.MemoryWatch(process.pid, _SAMPLE_S) as memory:
        summary = msgspec.json.decode(programs.finished(process))
    output.unlink()
    return float(summary["tokens_per_s"]), memory.most


def by_length(lengths: list[int], name: str, cache: Path, rounds: int, tokens: int) -> str:
    """tokens: about how many in each round."""
    model = models.build(name, cache)
    plan = plan_of("cpu", [], model)
    cores = len(os.sched_getaffinity(0))
    found: dict[int, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        client = stack.enter_context(start_instance(plan))
        plain = stack.enter_context(PlainProcesses(model, cores))
        least = least_batch(client)
        for length in lengths:
            # Whole turns of all lanes and cores, so that none is left over at the end.
            turn = plan.groups * plan.lanes * cores
            count = max(1, round(tokens / length / turn)) * turn
            prompts = random_prompts([length] * count, plan.config.vocab_size)
            batches = engine_batches(plan.topology, plan.groups, least, [length] * count)

            def engine(prompts: list[list[int]] = prompts) -> float:
                return run_round(client, prompts, window_of(plan)).seconds / len(prompts)

            def attention(
                prompts: list[list[int]] = prompts, batches: list[list[int]] = batches
            ) -> float:
                return plain.run(prompts, batches, attention_alone=True).seconds / len(prompts)

            engine()  # warm
            found[length] = report.alternate({"engine": engine, "attention": attention}, rounds)
    return _curve(found)


def _curve(found: dict[int, dict[str, list[float]]]) -> str:
    engine = {length: statistics.median(each["engine"]) for length, each in found.items()}
    alone = {length: statistics.median(each["attention"]) for length, each in found.items()}
    # Least squares of (alone + a token's rest * length) / engine - 1.
    above = sum(n / engine[n] * (1 - alone[n] / engine[n]) for n in found)
    rest = above / sum((n / engine[n]) ** 2 for n in found)
    return report.table(
        {
            "tokens": f"{length:,}",
            "ms a prompt": report.median_range([s * 1e3 for s in each["engine"]], 1),
            "attention alone": report.median_range([s * 1e3 for s in each["attention"]], 1),
            "attention's curve": f"{(alone[length] + rest * length) * 1e3:,.1f}",
            "off it by": f"{engine[length] / (alone[length] + rest * length) - 1:+.0%}",
        }
        for length, each in found.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Does cost grow with the work alone?")
    parser.add_argument("--counts", default=",".join(map(str, _COUNTS)), metavar="N,N")
    parser.add_argument("--lengths", default=",".join(map(str, _LENGTHS)), metavar="N,N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--model", default="a", metavar="NAME", help="for the lengths")
    parser.add_argument("--cache", type=Path, default=models.DEFAULT_CACHE, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="small counts and lengths, 1 round")
    options = parser.parse_args()
    counts = [100, 1000] if options.quick else [int(n) for n in options.counts.split(",")]
    lengths = [128, 512, 2048] if options.quick else [int(n) for n in options.lengths.split(",")]
    rounds, tokens = (1, 8_192) if options.quick else (options.rounds, 32_768)
    print(report.header("By the number of prompts, and by their length"))
    print(f"By number, demo model:\n\n{by_number(counts, 'demo', rounds)}", flush=True)
    table = by_length(lengths, options.model, options.cache, rounds, tokens)
    print(f"By length, model {options.model}, in medians where no range is given:\n\n{table}")


if __name__ == "__main__":
    main()
