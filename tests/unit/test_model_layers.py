"""The parts of the model against plain formulas: rope, attention of spans, routing, experts, KV."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from engine.model import blocked_attention, spans
from engine.model.architecture import ModelConfig, Rope, Router
from engine.model.config import load_config
from engine.model.families import READERS
from engine.model.fields import Fields
from engine.model.kv import PromptKV
from engine.model.loading import load_attention, load_experts
from engine.model.rope import rotate, rotation
from engine.model.router import Gate
from engine.model.sizes import kv_bytes_per_token, weight_bytes, working_set_bytes
from helpers.checkpoints import checkpoint


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_config(checkpoint("qwen3_moe"))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 8,
            "beta_slow": 2,
            "truncate": False,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.3,
        },
    ],
)
def test_rope_equals_transformers(parameters: dict[str, object]) -> None:
    theirs = Qwen3MoeConfig(
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 5000.0, **parameters},
    )
    fields = Fields(theirs.to_dict(), Path("config.json"))
    rope = READERS["qwen3_moe"](fields).rope
    fields.finish()
    positions = torch.arange(512)
    found = rotation(rope, positions, torch.float32)
    cos, sin = Qwen3MoeRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    assert torch.equal(found.cos, cos[0, :, :16])
    assert torch.equal(found.sin, sin[0, :, :16])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_depends_on_distance_only(interleaved: bool) -> None:
    rope = Rope(dim=8, theta=100.0, interleaved=interleaved)
    query, key = torch.randn(2, 1, 1, 8).double()

    def score(at: int, back: int) -> torch.Tensor:
        turns = [rotation(rope, torch.tensor([p]), torch.float64) for p in (at, at - back)]
        q, k = (rotate(x, t, interleaved) for x, t in zip((query, key), turns, strict=True))
        return (q * k).sum()

    assert torch.allclose(score(3, 2), score(90, 2), atol=1e-4)
    assert not torch.allclose(score(3, 2), score(3, 1), atol=1e-4)


def naive_attention(query, key, value, window, scale):
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    group = query.shape[1] // key.shape[1]
    for row in range(len(query)):
        at = len(key) - len(query) + row
        seen = slice(0 if window is None else max(0, at - window + 1), at + 1)
        for head in range(query.shape[1]):
            k, v = key[seen, head // group], value[seen, head // group]
            out[row, head] = (scale * k @ query[row, head]).softmax(0) @ v
    return out


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (9, 9), (4, 9), (1, 9), (20, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_of_a_span(
    rows: int,
    keys: int,
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32 by blocks, otherwise by torch's fused kernel."""
    monkeypatch.setattr(spans, "_BLOCK", 6)
    monkeypatch.setattr(blocked_attention, "_ROWS", 6)
    monkeypatch.setattr(blocked_attention, "_QUERIES", 3)
    torch.manual_seed(rows * keys)
    shapes = (rows, 4, 8), (keys, 2, 8), (keys, 2, 5)
    query, key, value = (torch.randn(shape, dtype=dtype) for shape in shapes)
    found = spans.attend(query, key, value, window, 0.4)
    expected = naive_attention(query, key, value, window, 0.4)
    assert found.shape == (rows, 4, 5)
    assert torch.allclose(found, expected, atol=1e-5)


def test_long_masked_spans_make_no_square_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **options):
        masks.append(attn_mask.numel())
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    heads = torch.randn(4000, 1, 4, dtype=torch.float64)
    spans.attend(heads, heads, heads, 100, 1.0)
    assert max(masks) <= 512 * (512 + 100)


def gate_with(config: ModelConfig, router: Router, logits: torch.Tensor) -> Gate:
    """A gate whose logits for one-hot inputs are the rows of `logits`."""
    experts, tokens = logits.shape[1], logits.shape[0]
    gate = Gate(msgspec.structs.replace(config, router=router, experts=experts, hidden_size=tokens))
    gate.weight.data = logits.T.contiguous()
    return gate


def test_softmax_routing(config: ModelConfig) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    for normalize in (False, True):
        gate = gate_with(config, Router("softmax", 2, normalize, scaling=2.0), logits)
        experts, weights = gate(torch.ones(1, 1))
        assert experts.tolist() == [[1, 2]]
        chosen = logits.softmax(-1)[0, [1, 2]]
        expected = 2 * (chosen / chosen.sum() if normalize else chosen)
        assert torch.allclose(weights[0], expected)
        assert experts.dtype == torch.int64 and weights.dtype == torch.float32


def test_sigmoid_routing_selects_with_the_bias_and_weighs_without(config: ModelConfig) -> None:
    # Groups of two: the second has the best expert, the first the best pair.
    logits = torch.tensor([[1.0, 0.9, 1.5, -3.0, -2.0, -2.0]])
    router = Router("sigmoid", 2, normalize=False, groups=3, top_groups=1)
    gate = gate_with(config, router, logits)
    experts, weights = gate(torch.ones(1, 1))
    assert sorted(experts[0].tolist()) == [0, 1]
    gate.e_score_correction_bias.fill_(-5.0)  # all negative: outside groups must stay outside
    gate.e_score_correction_bias[4:] = -4.0
    experts, weights = gate(torch.ones(1, 1))
    assert sorted(experts[0].tolist()) == [4, 5]
    assert torch.allclose(weights, logits[:, [4, 5]].sigmoid())


def test_experts_are_safe_with_nothing_to_do(config: ModelConfig) -> None:
    experts = load_experts(checkpoint("qwen3_moe"), config, torch.float32, range(2, 5))
    counts = torch.zeros(3, dtype=torch.int32)
    index, weights = torch.zeros(0, dtype=torch.int32), torch.zeros(0)
    out = torch.full((2, 32), float("nan"))
    experts.serve(0, torch.randn(2, 32), counts, index, weights, out)
    assert out.eq(0).all()
    experts.serve(0, torch.randn(0, 32), counts, index, weights, out[:0])


def test_experts_write_the_payload_dtype(config: ModelConfig) -> None:
    hidden = torch.randn(3, 32)
    work = (
        torch.tensor([2, 0, 2], dtype=torch.int32),
        torch.tensor([0, 2, 1, 2], dtype=torch.int32),
        torch.rand(4),
    )
    outs = {}
    for dtype in (torch.float32, torch.bfloat16):
        experts = load_experts(checkpoint("qwen3_moe"), config, dtype, range(3))
        outs[dtype] = torch.empty(3, 32, dtype=dtype)
        experts.serve(1, hidden.to(dtype), *work, outs[dtype])
    assert torch.allclose(outs[torch.float32], outs[torch.bfloat16].float(), atol=0.1)


def test_kv_of_whole_prompts_is_not_retained(config: ModelConfig) -> None:
    kv = PromptKV(config, 5, torch.float32, keep=False)
    parts = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    assert kv.extend(0, 0, parts)[0] is parts[0]
    with pytest.raises(ValueError, match="not kept"):
        kv.tensors()


def test_kv_of_chunks_comes_in_order(config: ModelConfig) -> None:
    kv = PromptKV(config, 5, torch.float32, keep=False)
    key, value = torch.randn(2, 5, 2, 16)
    for start, end in ((0, 2), (2, 4), (4, 5)):
        keys, values = kv.extend(1, start, (key[start:end], value[start:end]))
        assert torch.equal(keys, key[:end]) and torch.equal(values, value[:end])
    with pytest.raises(ValueError, match="layer 1 holds 5 of 5"):
        kv.extend(1, 5, (key[:1], value[:1]))
    with pytest.raises(ValueError, match="layer 0 holds 0 of 5"):
        kv.extend(0, 2, (key[:1], value[:1]))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_tied", "deepseek_v3"])
def test_sizes_of_weights_are_exact(name: str) -> None:
    config = load_config(checkpoint(name))
    attention = load_attention(checkpoint(name), config, torch.bfloat16)
    experts = load_experts(checkpoint(name), config, torch.bfloat16, range(1, 4))
    for role, module in (("attention", attention), ("expert", experts)):
        held = sum(t.numel() * t.element_size() for t in module.state_dict().values())
        assert weight_bytes(config, role, 3, dtype_bytes=2) == held
    assert kv_bytes_per_token(config, 4) > 0
    for role in ("attention", "expert"):
        few, many = (working_set_bytes(config, role, n, 4) for n in (10, 1000))
        assert 0 < few < many
