"""The attention rank: advances whichever lane is ready, and blocks only when none is."""

import logging
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch
import zmq

from engine.comm.attention_side import AttentionSide
from engine.comm.primitives import Arrival, AttentionEndpoint, Peer
from engine.control.messages import BatchDone, LaneStatus, Progress, Record, Run
from engine.device.base import Device
from engine.model.config import ModelConfig, load_config
from engine.model.loading import load_attention
from engine.paced.attention import PacedAttention
from engine.paced.pacer import Pacer
from engine.worker.lane import Lane
from engine.worker.lifeline import Lifeline
from engine.worker.meter import Meter
from engine.worker.opening import close_windows, listening, peers_of, team_of, transport_of
from engine.worker.parts import AttentionPart
from engine.worker.prompt import Prompt
from engine.worker.rank import ControlLink, Memory, own_agreement, run_rank
from engine.worker.recorder import Recorder
from engine.worker.spec import RankSpec
from engine.worker.turns import Follower, Leader, Turns

log = logging.getLogger(__name__)

_WARM_UP_S = 0.1  # how long to wait for expert ranks before listening to the supervisor again


class AttentionLoop:
    def __init__(
        self,
        lanes: list[Lane],
        turns: Turns,
        endpoint: AttentionEndpoint,
        link: ControlLink,
        lifeline: Lifeline,
        meter: Meter,
        recorder: Recorder,
    ) -> None:
        self._lanes = lanes
        self._turns = turns
        self._endpoint = endpoint
        self._link = link
        self._lifeline = lifeline
        self._meter = meter
        self._recorder = recorder
        self._memory = Memory()
        link.watch(*endpoint.sources, *turns.sources, lifeline.fileno())

    def run(self) -> NoReturn:
        """Until this process is killed: no rank ends in any other way."""
        while True:
            for message in self._link.receive():
                if isinstance(message, Run):
                    self._start(message)
                if isinstance(message, Record):
                    self._recorder.start(message.seconds)
            for peer in self._lifeline.receive():
                self._replace(peer)
            for arrival in self._endpoint.combine_recv():
                self._take(arrival)
            if self._recorder.over:
                self._link.send_spans(self._recorder)
            lane = self._turns.next(self._lanes)
            if lane is not None:
                self._advance(lane)
            else:
                self._wait()

    def _wait(self) -> None:
        recorder = self._recorder
        with ExitStack() as spans:
            batches = [(lane, lane.batch) for lane in self._lanes if lane.batch is not None]
            for lane, batch in batches:
                spans.enter_context(recorder.span("wait", batch.id, lane.index, lane.layer))
            with self._meter.waiting(bool(batches)):
                until = recorder.ends if recorder.on else math.inf
                self._link.wait(self._waiting, bool(batches), until)

    def _start(self, message: Run) -> None:
        batch = message.batch
        lane = self._lanes[message.lane]
        tokens = lane.own_tokens(batch)
        span = self._recorder.span("embed", batch.id, lane.index, tokens=tokens)
        with self._meter.computing(batch.id, tokens), span:
            lane.start(batch, message.requests, message.step)

    def _take(self, arrival: Arrival) -> None:
        lane = self._lanes[arrival.lane]
        batch = arrival.batch if lane.batch is None else lane.batch.id  # of groups in lockstep
        span = self._recorder.span(
            "combine",
            batch,
            arrival.lane,
            arrival.layer,
            arrival.tile,
            arrival.expert,
            arrival.n,
        )
        with self._meter.computing(batch), span:
            lane.take(arrival)

    def _advance(self, lane: Lane) -> None:
        assert lane.batch is not None
        batch, flops = lane.batch.id, lane.next_flops
        self._meter.predict(flops, lane.next_file_bytes)
        self._link.report_step(self._computing, self._meter.predicted_s)
        with self._meter.computing(batch, flops=flops):
            results = lane.advance()
        if results is not None:
            self._link.report(self._computing)
            if lane.answers:
                self._link.send(BatchDone(batch, results))

    def _replace(self, peer: Peer) -> None:
        """An expert rank was started again: what it had not answered is sent to its new life."""
        lost = self._endpoint.reconnect(peer)
        log.info(
            "%s is in life %d; %d dispatches go again", peer.id, peer.id.incarnation, len(lost)
        )
        for arrival in lost:
            self._lanes[arrival.lane].send_again(arrival)

    def _computing(self) -> Progress:
        return self._progress(waits_for=[])

    def _waiting(self) -> Progress:
        return self._progress(waits_for=sorted({e for lane in self._lanes for e in lane.awaited}))

    def _progress(self, waits_for: list[int]) -> Progress:
        batches = [(lane, lane.batch) for lane in self._lanes if lane.batch is not None]
        return Progress(
            busy_seconds=self._meter.busy_seconds,
            wait_seconds=self._meter.wait_seconds,
            paced_seconds=self._meter.paced_seconds,
            tokens=self._meter.tokens,
            work_items=self._meter.work_items,
            state="waiting" if waits_for else "computing" if batches else "idle",
            predicted_s=self._meter.predicted_s,
            waits_for=waits_for,
            lanes=[LaneStatus(lane.index, b.id, b.tokens, lane.layer) for lane, b in batches],
            memory_bytes=self._memory.read(),
        )


def main(payload: bytes, fds: list[int]) -> None:
    """Runs an attention rank as this process; see `run_rank`."""
    run_rank(payload, fds, _run)


def _run(
    spec: RankSpec, device: Device, windows: list[int], lifeline: Lifeline, meter: Meter
) -> None:
    agreement = spec.agreement
    dtype = getattr(torch, agreement.dtype)
    model_dir = Path(spec.model_dir)
    with zmq.Context() as context, listening(spec, context, windows) as ear:
        link = ControlLink(context, spec)
        config = load_config(model_dir)
        # Before any pair connects: building two communicators at a time may block a device.
        team = team_of(spec, device)
        endpoint = AttentionSide(
            spec.id,
            ear,
            peers_of(spec, windows),
            transport_of(spec, dtype, device),
            dtype,
            config.layers,
            spec.senders,
            context,
        )
        try:
            close_windows(windows)
            turns = _turns(spec, context)
            link.hello(own_agreement(spec, config))
            start = time.monotonic()
            model = _load(spec, config, device, meter)
            loaded = time.monotonic() - start
            while endpoint.warm_up(_WARM_UP_S):
                for peer in lifeline.receive():
                    endpoint.reconnect(peer)
            log.info("life %d is ready, loaded in %.2f s", spec.id.incarnation, loaded)
            link.ready(loaded)
            prompts: dict[int, Prompt] = {}
            recorder = Recorder()
            lanes = [
                Lane(
                    index=index,
                    model=model,
                    endpoint=endpoint,
                    bounds=[range(first, stop) for first, stop in spec.experts],
                    window_tokens=spec.peers[0].shape.rows,
                    prompts=prompts,
                    kv_metadata={
                        "architecture": config.architecture,
                        "model": agreement.model,
                        "model_hash": agreement.model_hash,
                    },
                    recorder=recorder,
                    team=team,
                    senders=spec.senders,
                )
                for index in range(agreement.lanes)
            ]
            AttentionLoop(lanes, turns, endpoint, link, lifeline, meter, recorder).run()
        finally:
            endpoint.close()


def _load(spec: RankSpec, config: ModelConfig, device: Device, meter: Meter) -> AttentionPart:
    dtype = getattr(torch, spec.agreement.dtype)
    if spec.hardware is not None:
        return PacedAttention(config, spec.hardware, dtype, Pacer(meter.pace))
    return load_attention(Path(spec.model_dir), config, dtype, device.torch, spec.shard)


def _turns(spec: RankSpec, context: zmq.Context[zmq.Socket[bytes]]) -> Turns:
    if spec.shard.member == 0:
        return Leader(context, spec.turns[1:])
    return Follower(context, spec.id, spec.turns[spec.shard.member])
