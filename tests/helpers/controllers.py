"""A controller without sockets, for tests of its accounts."""

from engine.control.controller import Controller, ControllerSpec
from engine.control.messages import Agreement, Hello, Message, PrefillRequest, Ready
from engine.schedule.policy import AsapPolicy
from engine.topology.ranks import RankId

AGREEMENT = Agreement(
    version="1",
    model="m",
    model_hash="h",
    dtype="float32",
    hidden_size=8,
    layers=2,
    experts=4,
    top_k=2,
    lanes=2,
    window_tokens=64,
)
RANKS = [RankId("attention", 0), RankId("expert", 0)]
CLIENT = b"client"


# One attention group of two ranks.
TEAM = [RankId("attention", 0), RankId("attention", 1), RankId("expert", 0)]


def make(ranks: list[RankId] = RANKS, min_batch_tokens: int | None = 10) -> Controller:
    """With one attention group, of all attention ranks in `ranks`."""
    spec = ControllerSpec(
        address="",
        agreement=AGREEMENT,
        ranks=ranks,
        groups=1,
        min_batch_tokens=min_batch_tokens,
        max_batch_tokens=20,
        exclusive_tokens=100,
        max_wait_s=1.0,
        tensor_parallel=sum(rank.role == "attention" for rank in ranks),
    )
    policy = AsapPolicy(
        groups=1,
        lanes=2,
        min_batch_tokens=min_batch_tokens or 20,
        max_batch_tokens=20,
        exclusive_tokens=100,
        max_wait_s=1.0,
    )
    return Controller(spec, policy)


def sent(controller: Controller, to: bytes) -> list[Message]:
    """Takes what is on its way to the peer `to`."""
    messages = [message for peer, message in controller.outbox if peer == to]
    others = [(peer, message) for peer, message in controller.outbox if peer != to]
    controller.outbox.clear()
    controller.outbox.extend(others)
    return messages


def started(ranks: list[RankId] = RANKS) -> Controller:
    controller = make(ranks)
    for rank in ranks:
        peer = str(rank).encode()
        controller.handle(peer, Hello(rank, 1, AGREEMENT), 0.0)
        controller.handle(peer, Ready(0.5), 0.0)
    controller.outbox.clear()
    return controller


def prompt(key: int, tokens: int) -> PrefillRequest:
    return PrefillRequest(key, list(range(tokens)))
