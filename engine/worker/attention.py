"""The attention rank: advances whichever lane is ready, and blocks only when none is."""

import logging
import time
from pathlib import Path

import torch
import zmq

from engine.comm.primitives import AttentionEndpoint
from engine.comm.shm import ShmAttentionEndpoint
from engine.control.messages import BatchDone, Run
from engine.model.config import load_config
from engine.model.loading import load_attention
from engine.worker.lane import Lane
from engine.worker.prompt import Prompt
from engine.worker.rank import ControlLink, Meter, own_agreement, peers_of, run_rank, wants_to_stop
from engine.worker.spec import RankSpec

log = logging.getLogger(__name__)


class AttentionLoop:
    def __init__(self, lanes: list[Lane], endpoint: AttentionEndpoint, link: ControlLink) -> None:
        self._lanes = lanes
        self._endpoint = endpoint
        self._link = link
        self._meter = Meter()
        self._next = 0  # the lane to look at first: they take turns
        link.watch(endpoint.socket)

    def run(self) -> None:
        """Until the controller says stop."""
        while True:
            messages = self._link.receive()
            if wants_to_stop(messages):
                return
            for message in messages:
                if isinstance(message, Run):
                    with self._meter.working(message.batch.tokens):
                        self._lanes[message.lane].start(message.batch, message.requests)
            for arrival in self._endpoint.combine_recv():
                with self._meter.working(0):
                    self._lanes[arrival.lane].take(arrival)
            lane = self._ready_lane()
            if lane is not None:
                self._advance(lane)
            else:
                self._link.wait(self._meter)

    def _ready_lane(self) -> Lane | None:
        count = len(self._lanes)
        for offset in range(count):
            lane = self._lanes[(self._next + offset) % count]
            if lane.ready:
                self._next = (lane.index + 1) % count
                return lane
        return None

    def _advance(self, lane: Lane) -> None:
        assert lane.batch is not None
        batch = lane.batch.id
        with self._meter.working(0):
            results = lane.advance()
        if results is None:
            self._link.report_if_due(self._meter)
        else:
            self._link.report(self._meter)
            self._link.send(BatchDone(batch, results))


def main(payload: bytes, fds: list[int]) -> None:
    """Runs an attention rank as this process. `payload` is a RankSpec, `fds` its windows."""

    def body(spec: RankSpec) -> None:
        agreement = spec.agreement
        with zmq.Context() as context:
            link = ControlLink(context, spec)
            config = load_config(Path(spec.model_dir))
            link.hello(own_agreement(spec, config))
            start = time.monotonic()
            dtype = getattr(torch, agreement.dtype)
            endpoint = ShmAttentionEndpoint(
                spec.id, spec.bell, peers_of(spec, fds), dtype, config.layers, context
            )
            try:
                model = load_attention(Path(spec.model_dir), config, dtype)
                loaded = time.monotonic() - start
                endpoint.warm_up(spec.warm_up_s)
                log.info("ready, weights loaded in %.2f s", loaded)
                link.ready(loaded)
                bounds = [range(first, stop) for first, stop in spec.experts]
                made_by = {
                    "architecture": config.architecture,
                    "model": agreement.model,
                    "model_hash": agreement.model_hash,
                }
                prompts: dict[int, Prompt] = {}
                lanes = [
                    Lane(index, model, endpoint, bounds, agreement.window_tokens, prompts, made_by)
                    for index in range(agreement.lanes)
                ]
                AttentionLoop(lanes, endpoint, link).run()
            finally:
                endpoint.close()

    run_rank(payload, body)
