"""Both halves of every family against transformers, in one process."""

import pytest
import torch

from engine.model.architecture import Latent
from engine.model.attention import Span
from engine.model.checkpoint import Checkpoint, audit
from helpers.checkpoints import (
    FAMILIES,
    checkpoint,
    reference_cache,
    reference_logits,
    tied_positions,
    token_ids,
)
from helpers.network import Network, Prompt

TOLERANCE = 1e-5
LENGTHS = [1, 2, 31, 33, 64, 129, 256, 511, 700]


def assert_parity(name: str, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        expected = reference_logits(checkpoint(name), prompt.token_ids)
        found = torch.cat(prompt.logits)
        assert found.shape == expected.shape
        tied = tied_positions(checkpoint(name), prompt.token_ids)
        assert len(tied) <= 1, f"{len(tied)} ties: choose other weights for this checkpoint"
        kept = [i for i in range(len(expected)) if i not in tied]
        error = (found - expected)[kept].abs().max().item()
        assert error <= TOLERANCE, f"{name}, {len(expected)} tokens: {error}"


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_whole_prompts(name: str, ranks: int) -> None:
    network = Network(checkpoint(name), ranks)
    prompts = [Prompt(network.attention, token_ids(length)) for length in LENGTHS]
    for batch in (prompts[:3], prompts[3:7], prompts[7:]):
        network.step([(prompt, Span(0, len(prompt.token_ids))) for prompt in batch])
    assert_parity(name, prompts)


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_equal_whole_prompts(name: str) -> None:
    network = Network(checkpoint(name), ranks=2)
    long = Prompt(network.attention, token_ids(700))
    short = Prompt(network.attention, token_ids(129))
    for batch in (
        [(long, Span(0, 1)), (short, Span(0, 100))],
        [(short, Span(100, 29)), (long, Span(1, 39))],
        [(long, Span(40, 600))],
        [(long, Span(640, 60))],
    ):
        network.step(batch)
    assert_parity(name, [long, short])


@pytest.mark.parametrize("chunks", [[200], [1, 150, 49]])
@pytest.mark.parametrize("name", FAMILIES)
def test_cache_equals_that_of_transformers(name: str, chunks: list[int]) -> None:
    network = Network(checkpoint(name))
    prompt = Prompt(network.attention, token_ids(200), keep=True)
    start = 0
    for length in chunks:
        network.step([(prompt, Span(start, length))])
        start += length
    cache = reference_cache(checkpoint(name), prompt.token_ids)
    tensors = prompt.kv.tensors()
    parts = list(network.config.kv_parts)
    assert len(tensors) == network.config.layers * len(parts)
    for layer in range(network.config.layers):
        found = tuple(tensors[f"layers.{layer}.{part}"] for part in parts)
        assert all(len(part) == 200 for part in found)
        theirs = cache.layers[layer]
        if isinstance(network.config.attention, Latent):
            if theirs.keys.shape[-1] != network.config.attention.kv_rank:  # it expands them
                attention = network.attention.model.layers[layer].self_attn
                found = attention.expand(*found)
            else:
                found = tuple(part[:, None] for part in found)
        for mine, reference in zip(found, (theirs.keys, theirs.values), strict=True):
            expected = reference[0].transpose(0, 1)
            window = network.config.sliding_window(layer)
            assert len(expected) == (200 if window is None else window - 1)
            assert torch.allclose(mine[-len(expected) :], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = token_ids(96)
    expected = reference_logits(checkpoint(name), ids)
    read = Checkpoint.read
    opened = Checkpoint(checkpoint(name))
    assert audit(opened, Network(checkpoint(name)).config) == []
    for zeroed in opened.names:

        def read_zeroed(self, tensor, rows=None, zeroed=zeroed):
            found = read(self, tensor, rows)
            return torch.zeros_like(found) if tensor == zeroed else found

        monkeypatch.setattr(Checkpoint, "read", read_zeroed)
        error = (Network(checkpoint(name)).logits(ids) - expected).abs().max().item()
        assert error > 100 * TOLERANCE, f"{zeroed} does not matter"
