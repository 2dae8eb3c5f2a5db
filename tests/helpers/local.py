"""The experts of a checkpoint behind an attention endpoint's interface, in this process."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.comm.primitives import Arrival
from engine.comm.routing import RankDispatch
from engine.control.messages import PrefillRequest, PrefillResult
from engine.model.config import load_config
from engine.model.loading import load_attention, load_experts
from engine.schedule.types import Batch
from engine.worker.lane import Lane


class LocalExperts:
    """Serves a dispatch at once; `arrivals` are what the lane has not been told of."""

    def __init__(self, model_dir: Path, bounds: Sequence[range]) -> None:
        config = load_config(model_dir)
        self._ranks = [load_experts(model_dir, config, torch.float32, span) for span in bounds]
        self._out: dict[tuple[int, int], Tensor] = {}
        self.arrivals: list[Arrival] = []

    def is_free(self, expert: int, lane: int) -> bool:
        return (expert, lane) not in self._out

    def dispatch_send(
        self,
        expert: int,
        lane: int,
        batch: int,
        layer: int,
        tile: int,
        source: Tensor,
        part: RankDispatch,
        again: bool = False,
    ) -> bool:
        out = torch.empty(part.n, source.shape[1])
        self._ranks[expert].serve(
            layer, source[part.rows], part.counts, part.row_index, part.weights, out
        )
        self._out[expert, lane] = out
        self.arrivals.append(Arrival(expert, batch, lane, layer, tile, part.n))
        return True

    def combine_add(self, arrival: Arrival, rows: Tensor, into: Tensor) -> None:
        into.index_add_(0, rows, self._out.pop((arrival.expert, arrival.lane)))


@torch.inference_mode()
def run_batches(
    model_dir: Path, batches: Sequence[Batch], requests: dict[int, PrefillRequest]
) -> dict[int, PrefillResult]:
    """Each batch through a lane, one after another; the lanes take turns."""
    config = load_config(model_dir)
    half = config.experts // 2
    bounds = (range(0, half), range(half, config.experts))
    experts = LocalExperts(model_dir, bounds)
    model = load_attention(model_dir, config, torch.float32)
    lanes = [
        Lane(
            index=index,
            model=model,
            endpoint=experts,  # type: ignore[arg-type]
            bounds=bounds,
            window_tokens=64,
            prompts=prompts,
            kv_metadata={},
        )
        for prompts in [{}]
        for index in range(2)
    ]
    results: dict[int, PrefillResult] = {}
    for number, batch in enumerate(batches):
        lane = lanes[number % 2]
        lane.start(batch, [requests[segment.key] for segment in batch.segments])
        while (done := lane.advance()) is None:
            while experts.arrivals:
                lane.take(experts.arrivals.pop())
        results |= {result.key: result for result in done}
    return results
