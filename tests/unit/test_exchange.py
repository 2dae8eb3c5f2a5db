"""The exchange of one layer: every tile to every rank, any arrival order, the same bits."""

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.comm.primitives import Arrival
from engine.comm.routing import RankDispatch
from engine.worker.exchange import Exchange

HIDDEN, EXPERTS, TOP_K = 8, 6, 4  # so that a token's sum has three parts
BOUNDS = (range(0, 3), range(3, 5), range(5, 6))


class InstantExperts:
    """An endpoint whose experts answer at once; the test chooses in which order that is heard.

    Expert e multiplies its input by (e + 1) and by a third, so that sums are not exact.
    """

    def __init__(self) -> None:
        self.busy: dict[int, tuple[Arrival, Tensor]] = {}
        self.sent: list[tuple[int, int]] = []  # (expert rank, tile)

    def is_free(self, expert: int, lane: int) -> bool:
        return expert not in self.busy

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
        if expert in self.busy:
            return False
        hidden = source[part.rows]
        out = torch.zeros_like(hidden)
        first = 0
        for local, count in enumerate(part.counts.tolist()):
            pairs = slice(first, first + count)
            rows = part.row_index[pairs].long()
            scale = (BOUNDS[expert].start + local + 1) / 3
            out.index_add_(0, rows, hidden[rows] * scale * part.weights[pairs, None])
            first += count
        self.busy[expert] = (Arrival(expert, batch, lane, layer, tile, part.n), out)
        self.sent.append((expert, tile))
        return True

    def combine_add(self, arrival: Arrival, rows: Tensor, into: Tensor) -> None:
        sent, out = self.busy.pop(arrival.expert)
        assert sent == arrival
        into.index_add_(0, rows, out)


def routed(tokens: int, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, experts = scores.topk(TOP_K, dim=-1)
    return SimpleNamespace(x=x, experts=experts, weights=weights)


def make(experts: InstantExperts, inputs: SimpleNamespace, window_tokens: int) -> Exchange:
    return Exchange(
        experts,  # type: ignore[arg-type]
        lane=0,
        batch=7,
        layer=3,
        routed=inputs,
        bounds=BOUNDS,
        window_tokens=window_tokens,
    )


def run(inputs: SimpleNamespace, window_tokens: int, order: random.Random) -> Tensor:
    experts = InstantExperts()
    exchange = make(experts, inputs, window_tokens)
    total = torch.zeros_like(inputs.x)
    exchange.send()
    heard: set[Arrival] = set()
    while not exchange.done:
        waiting: Sequence[Arrival] = [a for a, _ in experts.busy.values() if a not in heard]
        arrival = order.choice(waiting)
        heard.add(arrival)
        exchange.take(arrival, total)
    assert not experts.busy
    return total


@pytest.mark.parametrize("window_tokens", [1, 5, 16, 64])
def test_the_sum_is_that_of_all_experts_whatever_the_tiles(window_tokens: int) -> None:
    inputs = routed(33)
    expected = torch.zeros(33, HIDDEN)
    for k in range(TOP_K):
        scale = (inputs.experts[:, k] + 1)[:, None] / 3
        expected += inputs.x * scale * inputs.weights[:, k, None]
    torch.testing.assert_close(run(inputs, window_tokens, random.Random(1)), expected)


def test_the_order_of_arrival_changes_no_bit() -> None:
    inputs = routed(40, seed=3)
    first = run(inputs, 8, random.Random(0))
    for seed in range(1, 12):
        assert torch.equal(run(inputs, 8, random.Random(seed)), first)


def test_a_rank_without_tokens_is_neither_sent_to_nor_awaited() -> None:
    inputs = routed(10)
    inputs.experts = torch.tensor([[3, 4]]).expand(10, 2)
    experts = InstantExperts()
    exchange = make(experts, inputs, window_tokens=4)
    exchange.send()
    assert experts.sent == [(1, 0)]
    total = torch.zeros_like(inputs.x)
    for _ in range(3):
        exchange.take(experts.busy[1][0], total)
    assert exchange.done
    assert experts.sent == [(1, 0), (1, 1), (1, 2)]


def test_an_answer_of_another_layer_is_refused() -> None:
    inputs = routed(4)
    experts = InstantExperts()
    exchange = make(experts, inputs, window_tokens=4)
    with pytest.raises(ValueError, match="layer=2"):
        exchange.take(Arrival(0, 7, 0, 2, 0, 1), inputs.x)
