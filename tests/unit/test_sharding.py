"""Attention divided over the members of a group: the same logits and KV cache, smaller weights."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from engine.comm.collectives import TensorParallel
from engine.kv.team import whole_parts
from engine.model.architecture import GroupedQuery, ModelConfig
from engine.model.attention import AttentionModel, Span
from engine.model.checkpoint import Checkpoint
from engine.model.config import load_config
from engine.model.experts import ExpertModel
from engine.model.kv import PromptKV
from engine.model.loading import load_attention, load_experts
from engine.model.sharding import Shard, problems, shard_config
from engine.model.sizes import kv_bytes_per_token, weight_bytes, working_set_bytes
from helpers.checkpoints import FAMILIES, checkpoint, reference_logits, tied_positions, token_ids
from helpers.network import Network, serve
from helpers.network import Prompt as WholePrompt
from helpers.teams import in_team

TOLERANCE = 1e-5
# Each batch: (tokens of a prompt, the span of it that runs). Fewer rows than members too.
BATCHES = [
    [(1, Span(0, 1))],
    [(3, Span(0, 3))],
    [(200, Span(0, 1)), (5, Span(0, 5))],
    [(2, Span(0, 2)), (200, Span(1, 150)), (64, Span(0, 64))],
    [(200, Span(151, 49))],
]


class Member:
    """One member's way through the network: everything for its own rows, but mixing for all."""

    def __init__(self, model_dir: Path, team: TensorParallel, experts: ExpertModel) -> None:
        config = load_config(model_dir)
        self.team = team
        self.experts = experts
        self.model = load_attention(model_dir, config, torch.float32, shard=team.shard)
        self.kvs: dict[int, PromptKV] = {}
        self.logits: dict[int, list[Tensor]] = {}

    def step(self, batch: list[tuple[int, Span]]) -> None:
        model, team = self.model, self.team
        spans = [span for _, span in batch]
        for length, _ in batch:
            if length not in self.kvs:
                self.kvs[length] = PromptKV(model.config, length, model.dtype, keep=True)
        kvs = [self.kvs[length] for length, _ in batch]
        ids = [i for length, s in batch for i in token_ids(length)[s.start : s.start + s.length]]
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in spans])
        rope = model.rope(positions)
        hidden = model.embed(torch.tensor(ids)[team.rows(len(ids))])
        for layer in range(model.config.layers):
            x = team.gather(model.norm_input(layer, hidden), len(ids))
            hidden = hidden + team.scatter_sum(model.mix(layer, x, rope, spans, kvs))
            if not model.config.is_moe(layer):
                hidden = model.dense(layer, hidden)
                continue
            routed = model.route(layer, hidden)
            hidden = hidden + serve(self.experts, layer, routed)
            shared = model.shared(layer, routed.x)
            hidden = hidden if shared is None else hidden + shared
        whole = team.gather(model.logits(hidden), len(ids))
        for (length, span), part in zip(
            batch, whole.split([span.length for span in spans]), strict=True
        ):
            assert len(part) == span.length
            self.logits.setdefault(length, []).append(part)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_divided_group_computes_what_one_rank_does(name: str, size: int) -> None:
    model_dir = checkpoint(name)
    config = load_config(model_dir)
    experts = load_experts(model_dir, config, torch.float32, range(config.experts))

    def work(team: TensorParallel) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        member = Member(model_dir, team, experts)
        for batch in BATCHES:
            member.step(batch)
        caches = whole_parts(member.kvs[200], team, member.model.whole)
        return {length: torch.cat(parts) for length, parts in member.logits.items()}, caches

    members = in_team(size, work)
    for logits, _ in members:
        for length, found in logits.items():
            ids = token_ids(length)
            kept = sorted(set(range(length)) - tied_positions(model_dir, ids))
            assert len(kept) >= length - 1
            error = (found - reference_logits(model_dir, ids))[kept].abs().max().item()
            assert error <= TOLERANCE, f"{length} tokens: {error}"

    network = Network(model_dir)
    prompt = WholePrompt(network.attention, token_ids(200), keep=True)
    network.step([(prompt, Span(0, 200))])
    expected = prompt.kv.tensors()
    cache, *others = [caches for _, caches in members]
    assert all(other == {} for other in others)
    assert list(cache) == list(expected)
    for part, tensor in expected.items():
        assert cache[part].shape == tensor.shape
        assert torch.allclose(cache[part], tensor, rtol=0, atol=TOLERANCE), part


def test_heads_that_are_brought_together_are_given_up_by_their_members() -> None:
    config = load_config(checkpoint("qwen3_moe"))

    def work(team: TensorParallel) -> int:
        kv = PromptKV(shard_config(config, 2), 3, torch.float32, keep=True)
        for layer in range(config.layers):
            kv.extend(layer, 0, (torch.zeros(3, 1, 16), torch.zeros(3, 1, 16)))
        assert kv.nbytes > 0
        whole_parts(kv, team, config)
        return kv.nbytes

    assert in_team(2, work) == [0, 0]


def test_an_unfinished_cache_is_not_exported() -> None:
    config = load_config(checkpoint("qwen3_moe"))
    kv = PromptKV(config, 3, torch.float32, keep=True)
    with pytest.raises(ValueError, match="not finished"):
        whole_parts(kv, TensorParallel.solo(), config)
    with pytest.raises(ValueError, match="not finished"):
        kv.take(0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe_tied", "mixtral", "deepseek_v3", "deepseek_v3_plain"])
def test_sizes_of_a_members_weights_are_exact(name: str, size: int) -> None:
    config = load_config(checkpoint(name))
    expected = weight_bytes(config, "attention", 0, 2, size)
    for member in range(size):
        model = load_attention(checkpoint(name), config, torch.bfloat16, shard=Shard(member, size))
        assert held(model) == expected
        assert model.device == torch.device("cpu")
        for parameter, tensor in model.state_dict().items():
            # A view of the whole tensor would keep all of it in memory.
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, parameter
    assert size == 1 or expected < weight_bytes(config, "attention", 0, 2)


def held(model: AttentionModel) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def test_columns_in_the_checkpoints_dtype_are_copied_too() -> None:
    config = load_config(checkpoint("mixtral"))
    model = load_attention(checkpoint("mixtral"), config, torch.float32, shard=Shard(1, 2))
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert weight.shape == (32, 16)
    assert weight.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("qwen3_moe", {"q_proj": (48, 64), "k_proj": (16, 32), "v_proj": (16, 32)}),
        ("deepseek_v3", {"q_b_proj": (60, 80), "kv_b_proj": (66, 88)}),
    ],
)
def test_a_member_reads_its_rows_only(
    name: str, rows: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, slice | None] = {}
    original = Checkpoint.read

    def spy(self: Checkpoint, tensor: str, part: slice | None = None) -> Tensor:
        read[tensor] = part
        return original(self, tensor, part)

    monkeypatch.setattr(Checkpoint, "read", spy)
    config = load_config(checkpoint(name))
    load_attention(checkpoint(name), config, torch.float32, shard=Shard(3, 4))
    cut = {tensor: part for tensor, part in read.items() if part is not None}
    assert cut == {
        f"model.layers.{layer}.self_attn.{projection}.weight": slice(*part)
        for layer in range(config.layers)
        for projection, part in rows.items()
    }


@pytest.fixture(scope="module")
def grouped() -> ModelConfig:
    return load_config(checkpoint("qwen3_moe"))


def with_heads(config: ModelConfig, heads: int, kv_heads: int) -> ModelConfig:
    assert isinstance(config.attention, GroupedQuery)
    shape = msgspec.structs.replace(config.attention, heads=heads, kv_heads=kv_heads)
    return msgspec.structs.replace(config, attention=shape)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "possible"),
    [
        (12, 6, [1, 2, 3, 6, 12]),  # 4 divides the heads, but neither divides the other
        (64, 4, [1, 2, 4, 8, 16, 32, 64]),
        (7, 1, [1, 7]),
    ],
)
def test_what_divides_evenly(
    grouped: ModelConfig, heads: int, kv_heads: int, possible: list[int]
) -> None:
    config = with_heads(grouped, heads, kv_heads)
    assert [n for n in range(1, heads + 2) if not problems(config, n)] == possible
    assert problems(config, 0)
    for size in possible:
        local = shard_config(config, size).attention
        assert isinstance(local, GroupedQuery)
        assert (local.heads, local.kv_heads) == (heads // size, max(1, kv_heads // size))
    listed = ", ".join(map(str, possible))
    assert problems(config, 5) == [
        f"{heads} attention heads and {kv_heads} key-value heads cannot be divided evenly over "
        f"5 ranks (possible: {listed})"
    ]
    with pytest.raises(ValueError, match="cannot be divided evenly over 5 ranks"):
        shard_config(config, 5)


def test_latent_attention_divides_by_heads_alone() -> None:
    config = load_config(checkpoint("deepseek_v3"))
    assert problems(config, 3) == [
        "4 attention heads cannot be divided evenly over 3 ranks (possible: 1, 2, 4)"
    ]
    assert shard_config(config, 4).attention.heads == 1
    assert shard_config(config, 4).kv_parts == config.kv_parts


def test_long_lists_are_cut(grouped: ModelConfig) -> None:
    [problem] = problems(with_heads(grouped, 5040, 1), 11)
    assert problem.endswith("(possible: 1, 2, 3, 4, 5, 6, 7, 8, ...)")


def test_memory_of_a_member(grouped: ModelConfig) -> None:
    assert kv_bytes_per_token(grouped, 2, 2) == kv_bytes_per_token(grouped, 2) // 2
    assert kv_bytes_per_token(grouped, 2, 4) == kv_bytes_per_token(grouped, 2) // 2
    latent = load_config(checkpoint("deepseek_v3"))
    assert kv_bytes_per_token(latent, 2, 4) == kv_bytes_per_token(latent, 2)
    wide = msgspec.structs.replace(with_heads(grouped, 64, 4), vocab_size=1)
    one, two, four = (working_set_bytes(wide, "attention", 4096, 2, n) for n in (1, 2, 4))
    assert four < two < one
