"""asapctl as it comes: an instance of the default topology, without a setting for the model."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from protocol import serve

from engine.bench.rounds import run_round
from engine.launch.plan import make_plan
from engine.launch.running import start_instance
from engine.offline.job import window_of
from engine.topology.load import DEFAULT_TOPOLOGY, load_topology


class Asapctl:
    def __init__(self, order: dict[str, Any], stack: ExitStack) -> None:
        plan = make_plan(load_topology(DEFAULT_TOPOLOGY, order["overrides"]), Path(order["model"]))
        self._window = window_of(plan)
        self._client = stack.enter_context(start_instance(plan))
        self.prefill(order["sample"], order["threads"])
        self.setting = (
            f"{DEFAULT_TOPOLOGY}: {plan.groups} attention, {len(plan.experts)} expert ranks, "
            f"{plan.lanes} lanes"
        )

    def prefill(self, prompts: list[list[int]], threads: int) -> list[int]:
        return run_round(self._client, prompts, self._window).token_ids


if __name__ == "__main__":
    with ExitStack() as running:
        serve(lambda order: Asapctl(order, running))
