"""The expert rank: serves work items in ready order, round-robin over attention groups.

It is stateless: an item names its layer, and layers come in any order. No group waits for
another; one may be layers ahead.
"""

import logging
import time
from pathlib import Path

import torch
import zmq

from engine.comm.primitives import ExpertEndpoint, WorkItem
from engine.comm.shm import ShmExpertEndpoint
from engine.model.config import load_config
from engine.model.experts import ExpertModel
from engine.model.loading import load_experts
from engine.schedule.order import RoundRobin
from engine.worker.rank import ControlLink, Meter, own_agreement, peers_of, run_rank, wants_to_stop
from engine.worker.spec import RankSpec

log = logging.getLogger(__name__)


class ExpertLoop:
    def __init__(self, model: ExpertModel, endpoint: ExpertEndpoint, link: ControlLink) -> None:
        self._model = model
        self._endpoint = endpoint
        self._link = link
        self._meter = Meter()
        self._order: RoundRobin[WorkItem] = RoundRobin()
        link.watch(endpoint.socket)

    def run(self) -> None:
        """Until the controller says stop."""
        while not wants_to_stop(self._link.receive()):
            for ready in self._endpoint.dispatch_recv():
                self._order.push(ready.group, ready)
            item = self._order.pop()
            if item is None:
                self._link.wait(self._meter)
            elif self._endpoint.is_current(item):
                self._serve(item)
                self._link.report_if_due(self._meter)

    def _serve(self, item: WorkItem) -> None:
        with self._meter.working(item.n):
            work = self._endpoint.open(item)
            self._model.serve(
                item.layer, work.hidden, work.counts, work.row_index, work.weights, work.out
            )
            self._endpoint.combine_send(item)
        log.debug("served %s", item)


def main(payload: bytes, fds: list[int]) -> None:
    """Runs an expert rank as this process. `payload` is a RankSpec, `fds` its windows."""

    def body(spec: RankSpec) -> None:
        with zmq.Context() as context:
            link = ControlLink(context, spec)
            config = load_config(Path(spec.model_dir))
            link.hello(own_agreement(spec, config))
            start = time.monotonic()
            dtype = getattr(torch, spec.agreement.dtype)
            endpoint = ShmExpertEndpoint(
                spec.id, spec.bell, peers_of(spec, fds), dtype, config.layers, context
            )
            try:
                experts = range(*spec.experts[spec.id.rank])
                model = load_experts(Path(spec.model_dir), config, dtype, experts)
                loaded = time.monotonic() - start
                endpoint.warm_up(spec.warm_up_s)
                log.info("ready, weights loaded in %.2f s", loaded)
                link.ready(loaded)
                ExpertLoop(model, endpoint, link).run()
            finally:
                endpoint.close()

    run_rank(payload, body)
