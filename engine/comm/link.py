"""One direction of one pair of ranks: a communicator of two, and the thread that waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor

from engine.comm.doorbell import Bell
from engine.device.base import Device

log = logging.getLogger(__name__)

# A bell whose message has come and the event after which it may be read; or what went wrong.
Report: TypeAlias = Callable[["Bell | None", Any, "str | None"], None]

_SENDER, _RECEIVER = 0, 1


class Link:
    """Sends, or receives, one message after another in the order of `put`.

    name: for messages. connect: builds the communicator, and blocks for as long as that takes.
    sends: which end this is. device: whose memory the messages lie in. overlap: on a stream of its
    own, where the device has streams. ahead: a message is reported when the device will receive it
    before what is launched after the event, and not only when it has. patience_s: how long a link
    that cannot connect waits to be closed, because the peer has another life, before it reports.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        sends: bool,
        device: Device,
        overlap: bool,
        ahead: bool = False,
        patience_s: float = 0.0,
    ) -> None:
        self.after: Link | None = None  # connects first
        self._name = name
        self._connect = connect
        self._sends = sends
        self._device = device
        self._overlap = overlap
        self._ahead = ahead
        self._patience_s = patience_s
        self._connected = threading.Event()
        self._closed = threading.Event()
        self._queue: SimpleQueue[tuple[Tensor, Bell | None, Any] | None] = SimpleQueue()

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    def start(self, report: Report) -> None:
        """report is called from the link's thread: when connected, with each bell whose message
        has been received, and with what went wrong.
        """
        # As a daemon: a thread that waits for a rank that is dead must not keep a process alive.
        self._thread = threading.Thread(
            target=self._run, args=(report,), name=self._name, daemon=True
        )
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits until the thread of a closed link has ended."""
        self._thread.join(timeout_s)

    def put(self, message: Tensor, bell: Bell | None = None) -> None:
        """The contents of `message` go out, or come in; on a device, after what was launched so
        far. Until then nobody else may touch it.
        """
        self._queue.put((message, bell, self._device.record()))

    def close(self) -> None:
        """Ends the thread once it is idle. What is under way may still fail; nobody hears of it."""
        self._closed.set()
        self._queue.put(None)

    def _run(self, report: Report) -> None:
        try:
            if self.after is not None:
                self.after._connected.wait()
            group = self._connect()
            stream = self._device.new_stream() if self._overlap else None
            # A first message may set the connection up: that is not to happen under load.
            self._pass(group, torch.zeros(1, dtype=torch.int8, device=self._device.torch), stream)
        except Exception as error:
            log.warning("no communicator for %s: %s", self._name, error)
            # Most likely the peer has died, and its next life will replace this link.
            if not self._closed.wait(self._patience_s):
                report(None, None, f"no communicator for {self._name}: {error}")
            return
        self._connected.set()
        report(None, None, None)
        while (job := self._queue.get()) is not None:
            message, bell, launched = job
            try:
                event = self._pass(group, message, stream, launched)
            except Exception as error:
                # A dead peer. Whether it gets another life is not this rank's to say.
                if not self._closed.is_set():
                    log.warning("%s broke: %s", self._name, error)
                return
            if bell is not None and not self._closed.is_set():
                report(bell, event, None)

    def _pass(self, group: Any, message: Tensor, stream: Any, launched: Any = None) -> Any:
        """Returns the event after which the message has passed."""
        device = self._device
        with torch.inference_mode(), device.on_stream(stream):
            device.wait_event(launched)
            if self._sends:
                work = group.send([message], _RECEIVER, 0)
            else:
                work = group.recv([message], _SENDER, 0)
            work.wait()  # the host, for gloo; the stream, on a device that has streams
            event = device.record()
        if not self._ahead:
            device.synchronize(event)
        return event
