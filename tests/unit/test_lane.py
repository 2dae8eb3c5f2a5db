"""A lane without processes: prompts that come in segments, prompt log-probabilities in chunks."""

import pytest
from torch import Tensor

from engine.control.messages import PrefillRequest, PrefillResult, Sampling
from engine.model.attention import AttentionModel
from engine.schedule.types import Batch, Segment
from engine.worker import prompt
from engine.worker.first_token import choose
from helpers.checkpoints import checkpoint, reference_logits, token_ids
from helpers.local import run_batches

TOLERANCE = 1e-5
LENGTHS = {0: 90, 1: 7, 2: 41}


def requests() -> dict[int, PrefillRequest]:
    return {
        key: PrefillRequest(key, token_ids(length), logprobs=3, prompt_logprobs=1)
        for key, length in LENGTHS.items()
    }


def whole() -> list[Batch]:
    return [Batch(0, tuple(Segment(key, 0, length) for key, length in LENGTHS.items()))]


def segments() -> list[Batch]:
    """The same prompts in pieces, over batches that mix them and lanes that alternate."""
    return [
        Batch(0, (Segment(0, 0, 1), Segment(1, 0, 5))),
        Batch(1, (Segment(2, 0, 40), Segment(0, 1, 32))),
        Batch(2, (Segment(1, 5, 2), Segment(0, 33, 57))),
        Batch(3, (Segment(2, 40, 1),)),
    ]


def values(result: PrefillResult) -> list[float]:
    assert result.prompt_logprobs is not None
    assert result.top is not None
    entries = [entry for entries in result.prompt_logprobs[1:] for entry in entries or ()]
    return [entry.logprob for entry in (*entries, *result.top)]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral_window", "deepseek_v3"])
@pytest.mark.parametrize("batches", [whole(), segments()], ids=["whole", "segments"])
def test_prompts_in_segments_give_what_transformers_gives(name: str, batches: list[Batch]) -> None:
    model_dir = checkpoint(name)
    asked = requests()
    results = run_batches(model_dir, batches, asked)
    assert set(results) == set(asked)
    for key, request in asked.items():
        logits = reference_logits(model_dir, request.token_ids).log_softmax(-1)
        assert results[key].token_id == int(logits[-1].argmax())
        scores = results[key].prompt_logprobs
        assert scores is not None
        assert len(scores) == LENGTHS[key]
        for position, entries in enumerate(scores[1:]):
            assert entries is not None
            actual = entries[0]
            assert actual.token_id == request.token_ids[position + 1]
            assert abs(actual.logprob - float(logits[position, actual.token_id])) <= TOLERANCE


def test_the_size_of_a_chunk_of_logits_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = checkpoint("qwen3_moe")
    expected = run_batches(model_dir, whole(), requests())
    for rows in (1, 7, 89):
        monkeypatch.setattr(prompt, "LOGITS_ROWS", rows)
        results = run_batches(model_dir, whole(), requests())
        for key in LENGTHS:
            assert values(results[key]) == pytest.approx(values(expected[key]), abs=1e-6)


def test_sampling() -> None:
    logits = reference_logits(checkpoint("qwen3_moe"), token_ids(9))[-1]
    order = logits.argsort(descending=True).tolist()
    assert choose(logits, Sampling()) == order[0]
    drawn = {choose(logits, Sampling(temperature=2.0, seed=seed)) for seed in range(60)}
    assert len(drawn) > 10
    assert choose(logits, Sampling(2.0, seed=5)) == choose(logits, Sampling(2.0, seed=5))
    few = {choose(logits, Sampling(5.0, top_k=3, seed=seed)) for seed in range(60)}
    assert few == set(order[:3])
    assert {choose(logits, Sampling(5.0, top_p=1e-6, seed=seed)) for seed in range(9)} == {order[0]}


@pytest.mark.parametrize("extreme", [Sampling(1e-300), Sampling(1e-40), Sampling(1.0, top_p=1e-46)])
def test_extreme_sampling_is_greedy(extreme: Sampling) -> None:
    logits = reference_logits(checkpoint("qwen3_moe"), token_ids(9))[-1]
    assert choose(logits, extreme) == int(logits.argmax())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_logits_that_are_not_finite_fail_their_prompt_alone(
    wrong: float, prompt_logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = AttentionModel.logits
    rows = 0

    def spoil_the_first(self: AttentionModel, hidden: Tensor) -> Tensor:
        nonlocal rows
        out = logits(self, hidden)
        if rows == 0:
            out[0, 3] = wrong
        rows += len(hidden)
        return out

    monkeypatch.setattr(AttentionModel, "logits", spoil_the_first)
    asked = {
        key: PrefillRequest(key, token_ids(length), prompt_logprobs=prompt_logprobs)
        for key, length in LENGTHS.items()
    }
    results = run_batches(checkpoint("qwen3_moe"), whole(), asked)
    assert "not finite" in (results[0].error or "")
    assert [results[key].error for key in (1, 2)] == [None, None]
