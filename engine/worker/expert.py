"""The expert rank: serves work items in ready order, round-robin over attention groups.

It is stateless: an item names its layer, and layers come in any order. No group waits for
another; one may be layers ahead.
"""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import zmq

from engine.comm.channel import Transport
from engine.comm.doorbell import Ear
from engine.comm.expert_side import ExpertSide
from engine.comm.primitives import ExpertEndpoint, Work, WorkItem
from engine.control.messages import HotExpert, Progress, Record
from engine.device.base import Device
from engine.device.fused import fused
from engine.model.config import ModelConfig, load_config
from engine.model.experts import ExpertModel
from engine.model.loading import load_experts
from engine.paced.expert_side import PacedExpertSide
from engine.paced.experts import PacedExperts, tokens_a_pair
from engine.paced.pacer import Pacer
from engine.schedule.inflection import inflection_point
from engine.schedule.order import RoundRobin
from engine.worker.expert_times import expert_times
from engine.worker.lifeline import Lifeline
from engine.worker.meter import Meter
from engine.worker.opening import close_windows, listening, peers_of, transport_of
from engine.worker.parts import ExpertPart
from engine.worker.rank import ControlLink, Memory, own_agreement, run_rank
from engine.worker.recorder import Recorder
from engine.worker.spec import RankSpec

log = logging.getLogger(__name__)

_MEASURE_S = 0.1  # of one batch; what is tried after is twice as large


class ExpertLoop:
    """device: where the experts are. payload: where dispatches arrive, which may be the host."""

    def __init__(
        self,
        model: ExpertPart,
        experts: range,
        endpoint: ExpertEndpoint,
        link: ControlLink,
        lifeline: Lifeline,
        meter: Meter,
        device: torch.device,
        payload: torch.device,
    ) -> None:
        self._model = model
        self._device = device
        self._experts = experts
        self._endpoint = endpoint
        self._link = link
        self._lifeline = lifeline
        self._meter = meter
        self._recorder = Recorder()
        self._memory = Memory()
        self._order: RoundRobin[WorkItem] = RoundRobin()
        # Tokens of each local expert, where counts arrive: looking at them would hold a device up.
        self._served = torch.zeros(len(experts), dtype=torch.int64, device=payload)
        self._load_seconds = 0.0
        self._inflection_tokens: int | None = None
        self._ready = False
        link.watch(*endpoint.sources, lifeline.fileno())

    def run(self, load_seconds: float, inflection_tokens: int | None) -> NoReturn:
        """Until this process is killed: no rank ends in any other way."""
        self._load_seconds = load_seconds
        self._inflection_tokens = inflection_tokens
        while True:
            for message in self._link.receive():
                if isinstance(message, Record):
                    self._recorder.start(message.seconds)
            if self._recorder.over:
                self._link.send_spans(self._recorder)
            for peer in self._lifeline.receive():
                self._endpoint.reconnect(peer)
                log.info("%s is in life %d", peer.id, peer.id.incarnation)
            for ready in self._endpoint.dispatch_recv():
                self._order.push(ready.group, ready)
            self._say_ready()
            item = self._order.pop()
            if item is None:
                with self._meter.waiting(with_work=False):
                    ends = self._recorder.ends if self._recorder.on else math.inf
                    until = min(ends, self._endpoint.due)
                    self._link.wait(self._idle, with_work=False, until=until)
            elif self._endpoint.is_current(item):
                self._serve(item)

    def _say_ready(self) -> None:
        """Once every attention rank has been heard of; it serves from the beginning."""
        if not self._ready and not self._endpoint.cold:
            self._ready = True
            log.info("ready, loaded in %.2f s", self._load_seconds)
            self._link.ready(self._load_seconds, self._inflection_tokens)

    def _serve(self, item: WorkItem) -> None:
        flops = self._model.flops(item.p)
        self._meter.predict(flops)
        self._link.report_step(self._computing, self._meter.predicted_s)
        span = self._recorder.span(
            "serve", item.batch, item.lane, item.layer, item.tile, item.group, item.n
        )
        with self._meter.computing(item.batch, item.n, flops), span:
            work = self._endpoint.open(item)
            with self._recorder.span("experts", item.batch, item.lane, item.layer, item.tile):
                self._compute(item.layer, work)
            self._served += work.counts.to(self._served.device)
            self._endpoint.combine_send(item, work)
        log.debug("served %s", item)

    def _compute(self, layer: int, work: Work) -> None:
        device = self._device
        if work.hidden.device == device:
            self._model.serve(
                layer, work.hidden, work.counts, work.row_index, work.weights, work.out
            )
            return
        hidden = work.hidden.to(device)  # the transport is the host's
        counts, rows, weights = (
            part.to(device) for part in (work.counts, work.row_index, work.weights)
        )
        out = torch.empty_like(hidden)
        self._model.serve(layer, hidden, counts, rows, weights, out)
        work.out.copy_(out)

    def _computing(self) -> Progress:
        return self._progress("computing")

    def _idle(self) -> Progress:
        return self._progress("idle")

    def _progress(self, state: str) -> Progress:
        return Progress(
            busy_seconds=self._meter.busy_seconds,
            paced_seconds=self._meter.paced_seconds,
            tokens=self._meter.tokens,
            work_items=self._meter.work_items,
            state="computing" if state == "computing" else "idle",
            predicted_s=self._meter.predicted_s,
            queue=len(self._order),
            serving=sorted({item.layer for item in self._order}),
            hottest=self._hottest(),
            memory_bytes=self._memory.read(),
        )

    def _hottest(self) -> HotExpert | None:
        tokens = int(self._served.sum())
        if not tokens:
            return None
        local = int(self._served.argmax())
        most = int(self._served[local])
        return HotExpert(self._experts[local], most, most * len(self._experts) / tokens)


def main(payload: bytes, fds: list[int]) -> None:
    """Runs an expert rank as this process; see `run_rank`."""
    run_rank(payload, fds, _run)


def _run(
    spec: RankSpec, device: Device, windows: list[int], lifeline: Lifeline, meter: Meter
) -> None:
    dtype = getattr(torch, spec.agreement.dtype)
    experts = range(*spec.experts[spec.id.rank])
    model_dir = Path(spec.model_dir)
    with zmq.Context() as context, listening(spec, context, windows) as ear:
        link = ControlLink(context, spec)
        config = load_config(model_dir)
        transport = transport_of(spec, dtype, device)
        endpoint = _endpoint(spec, config, ear, windows, transport, context)
        try:
            close_windows(windows)
            link.hello(own_agreement(spec, config))
            start = time.monotonic()
            model = _load(spec, config, device, endpoint, meter)
            loaded = time.monotonic() - start
            inflection = _inflection(spec, model, device)
            places = device.torch, transport.memory
            loop = ExpertLoop(model, experts, endpoint, link, lifeline, meter, *places)
            loop.run(loaded, inflection)
        finally:
            endpoint.close()


def _inflection(spec: RankSpec, model: ExpertPart, device: Device) -> int | None:
    """None: nobody asked."""
    if spec.find_inflection is None:
        return None
    if isinstance(model, PacedExperts):
        return inflection_point(model.batch_seconds, spec.find_inflection)
    assert isinstance(model, ExpertModel)
    times = expert_times(model, getattr(torch, spec.agreement.dtype), device)
    return inflection_point(times, spec.find_inflection, _MEASURE_S)


def _endpoint(
    spec: RankSpec,
    config: ModelConfig,
    ear: Ear,
    windows: Sequence[int],
    transport: Transport,
    context: zmq.Context[zmq.Socket[bytes]],
) -> ExpertSide:
    dtype = getattr(torch, spec.agreement.dtype)
    wiring = (
        *(spec.id, ear, peers_of(spec, windows), transport, dtype, config.layers),
        *(spec.senders, context),
    )
    if spec.hardware is None:
        return ExpertSide(*wiring)
    share = tokens_a_pair(config, len(spec.experts))
    return PacedExpertSide(*wiring, spec.hardware.links, share)


def _load(
    spec: RankSpec, config: ModelConfig, device: Device, endpoint: ExpertSide, meter: Meter
) -> ExpertPart:
    if spec.hardware is not None:
        assert isinstance(endpoint, PacedExpertSide)
        pacer = Pacer(meter.pace, endpoint.until)
        return PacedExperts(config, len(spec.experts), spec.hardware, pacer)
    experts = range(*spec.experts[spec.id.rank])
    dtype = getattr(torch, spec.agreement.dtype)
    model = load_experts(Path(spec.model_dir), config, dtype, experts, device.torch)
    if (prepare := fused(device.torch).prepare) is not None:
        prepare(model.tables)
    return model
