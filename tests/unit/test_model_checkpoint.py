"""Checkpoint files: sharded, fused, half precision, and broken in every way."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import UsageError
from engine.model.checkpoint import Checkpoint, audit, model_hash
from engine.model.config import load_config
from engine.model.loading import load_attention, load_experts
from helpers.checkpoints import FAMILIES, checkpoint, reference_logits, reference_model, token_ids
from helpers.network import Network

IDS = token_ids(64)
Tensors = dict[str, Tensor]


def variant(
    target: Path, name: str, change: Callable[[Tensors], Tensors], **config: object
) -> Path:
    """A copy of a checkpoint with other tensors and config values."""
    target.mkdir(exist_ok=True)
    raw = json.loads((checkpoint(name) / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | config))
    tensors = change(load_file(checkpoint(name) / "model.safetensors"))
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors")
    return target


def shard(source: Path, target: Path, count: int = 3) -> Path:
    target.mkdir()
    shutil.copy(source / "config.json", target)
    tensors = sorted(load_file(source / "model.safetensors").items())
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = dict(tensors[i::count])
        save_file(part, target / file)
        weight_map |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def fuse(tensors: Tensors, *, transposed: bool = False) -> Tensors:
    """Per-expert tensors as transformers 5 holds them: two a layer."""
    fused: dict[str, list[list[Tensor]]] = {}
    rest = {}
    spelled = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1, "w2": 2, "down_proj": 2}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            rest[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
            continue
        prefix, expert, projection, _ = name.replace(".block_sparse_moe.", ".mlp.").rsplit(".", 3)
        slots = fused.setdefault(prefix, [[], [], []])[spelled[projection]]
        slots.extend([tensor] * (int(expert) + 1 - len(slots)))
        slots[int(expert)] = tensor
    for prefix, (gates, ups, downs) in fused.items():
        gate_up = torch.cat((torch.stack(gates), torch.stack(ups)), dim=1)
        down = torch.stack(downs)
        for name, tensor in (("gate_up_proj", gate_up), ("down_proj", down)):
            rest[f"{prefix}.{name}"] = tensor.transpose(1, 2) if transposed else tensor
    return rest


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_fused_experts_equal_separate_ones(tmp_path: Path, name: str, transposed: bool) -> None:
    fused = variant(tmp_path, name, lambda tensors: fuse(tensors, transposed=transposed))
    assert any(n.endswith("experts.gate_up_proj") for n in Checkpoint(fused).names)
    assert audit(Checkpoint(fused), load_config(fused)) == []
    expected = Network(checkpoint(name), ranks=2).logits(IDS)
    assert torch.equal(Network(fused, ranks=2).logits(IDS), expected)


def test_old_and_new_module_names_of_mixtral(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> Tensors:
        old, new = ".block_sparse_moe.", ".mlp."
        return {
            n.replace(old, new) if old in n else n.replace(new, old): t for n, t in tensors.items()
        }

    renamed = variant(tmp_path, "mixtral", rename)
    assert set(Checkpoint(renamed).names) != set(Checkpoint(checkpoint("mixtral")).names)
    assert audit(Checkpoint(renamed), load_config(renamed)) == []
    assert torch.equal(Network(renamed).logits(IDS), Network(checkpoint("mixtral")).logits(IDS))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_sharded_equals_single_file(tmp_path: Path, name: str) -> None:
    sharded = shard(checkpoint(name), tmp_path / "sharded")
    assert len(Checkpoint(sharded).files) == 3
    assert audit(Checkpoint(sharded), load_config(sharded)) == []
    assert torch.equal(Network(sharded).logits(IDS), Network(checkpoint(name)).logits(IDS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_into_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    half = variant(tmp_path, "qwen3_moe", lambda ts: {n: t.to(dtype) for n, t in ts.items()})
    expected = reference_logits(half, IDS)
    assert reference_model(half).dtype == torch.float32
    assert (Network(half, ranks=2).logits(IDS) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_compute_stays_near(name: str) -> None:
    network = Network(checkpoint(name), ranks=2, dtype=torch.bfloat16)
    assert network.attention.dtype == torch.bfloat16
    routers = [m for m in network.attention.modules() if type(m).__name__ == "Gate"]
    assert all(gate.weight.dtype == torch.float32 for gate in routers)
    logits = network.logits(IDS)
    assert logits.dtype == torch.float32
    # Routing flips in half precision, so only most of the logits are near.
    error = (logits - reference_logits(checkpoint(name), IDS)).abs()
    assert error.median() < 0.05


def test_tied_head_that_is_stored_is_used(tmp_path: Path) -> None:
    name = "qwen3_moe_tied"
    assert "lm_head.weight" not in Checkpoint(checkpoint(name)).names

    def add_head(tensors: Tensors) -> Tensors:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 1.5}

    stored = variant(tmp_path, name, add_head)
    assert audit(Checkpoint(stored), load_config(stored)) == []
    assert (Network(stored).logits(IDS) - reference_logits(stored, IDS)).abs().max() <= 1e-5


def test_a_rank_reads_its_own_experts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = checkpoint("qwen3_moe")
    config = load_config(model_dir)
    read: list[str] = []
    original = Checkpoint.read

    def spy(self: Checkpoint, name: str, rows: slice | None = None) -> Tensor:
        read.append(name)
        return original(self, name, rows)

    monkeypatch.setattr(Checkpoint, "read", spy)
    load_attention(model_dir, config, torch.float32)
    assert not any(".experts." in name for name in read)
    attention = set(read)
    read.clear()
    load_experts(model_dir, config, torch.float32, range(2, 5))
    assert {name.split(".experts.")[1].split(".")[0] for name in read} == {"2", "3", "4"}
    read.clear()
    load_experts(model_dir, config, torch.float32, range(8))
    assert attention | set(read) == set(Checkpoint(model_dir).names)
    assert attention.isdisjoint(read)


GATE = "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def reshaped(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[name][:-1]}


@pytest.mark.parametrize("name", [GATE, EXPERT, "lm_head.weight"])
@pytest.mark.parametrize(("change", "message"), [(without, "is missing"), (reshaped, "shape")])
def test_missing_and_misshapen_tensors_are_named(
    tmp_path: Path,
    name: str,
    change: Callable[[str], Callable[[Tensors], Tensors]],
    message: str,
) -> None:
    broken = variant(tmp_path, "qwen3_moe", change(name))
    config = load_config(broken)
    [problem] = audit(Checkpoint(broken), config)
    assert name in problem and message in problem
    with pytest.raises(UsageError, match=f"{name}.*{message}"):
        load_attention(broken, config, torch.float32)
        load_experts(broken, config, torch.float32, range(8))


def test_a_misshapen_fused_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.down_proj"
    broken = variant(tmp_path, "qwen3_moe", lambda tensors: reshaped(name)(fuse(tensors)))
    config = load_config(broken)
    [problem] = audit(Checkpoint(broken), config)
    assert name in problem and "shape" in problem
    with pytest.raises(UsageError, match=f"{name}.*shape"):
        load_experts(broken, config, torch.float32, range(8))


def test_tensors_that_nobody_reads_are_named(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.sinks": torch.ones(4),
        "model.layers.3.input_layernorm.weight": torch.ones(32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    changed = variant(tmp_path, "deepseek_v3", lambda tensors: tensors | extra)
    problems = audit(Checkpoint(changed), load_config(changed))
    assert len(problems) == 2
    assert "self_attn.sinks" in problems[0] and "model.layers.3." in problems[1]
    changed = variant(
        tmp_path, "deepseek_v3", lambda tensors: tensors | extra, num_nextn_predict_layers=1
    )
    problems = audit(Checkpoint(changed), load_config(changed))
    assert len(problems) == 1  # layer 3 predicts further tokens


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    broken = variant(
        tmp_path, "qwen3_moe", lambda ts: ts | {name: ts[name].to(torch.float8_e4m3fn)}
    )
    [problem] = audit(Checkpoint(broken), load_config(broken))
    assert name in problem and "F8_E4M3" in problem
    with pytest.raises(UsageError, match="quantised"):
        load_attention(broken, load_config(broken), torch.float32)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no weights"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match=r"only \.bin"):
        Checkpoint(tmp_path)


def test_missing_truncated_and_foreign_shards(tmp_path: Path) -> None:
    sharded = shard(checkpoint("qwen3_moe"), tmp_path / "sharded")
    second = sharded / "model-00002-of-00003.safetensors"
    content = second.read_bytes()
    for broken, message in [
        (content[:-1], "truncated"),
        (content[:100], "truncated"),
        (b"", "truncated"),
        (b"\x08" + bytes(7) + b"not json", "not a safetensors file"),
    ]:
        second.write_bytes(broken)
        with pytest.raises(UsageError, match=f"{second}.*{message}"):
            Checkpoint(sharded)
    second.unlink()
    with pytest.raises(UsageError, match=f"{second} is missing"):
        Checkpoint(sharded)


def test_an_index_that_does_not_fit(tmp_path: Path) -> None:
    sharded = shard(checkpoint("qwen3_moe"), tmp_path / "sharded")
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.more"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UsageError, match=r"00001.*model\.more"):
        Checkpoint(sharded)
    for broken in ("{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'):
        index.write_text(broken)
        with pytest.raises(UsageError, match=r"index\.json"):
            Checkpoint(sharded)


def test_model_hash(tmp_path: Path) -> None:
    original = model_hash(checkpoint("qwen3_moe"))
    same = variant(tmp_path, "qwen3_moe", lambda tensors: tensors)
    shutil.copy(checkpoint("qwen3_moe") / "config.json", same)
    shutil.copy(checkpoint("qwen3_moe") / "model.safetensors", same)
    assert model_hash(same) != original  # generation_config.json belongs to it
    shutil.copy(checkpoint("qwen3_moe") / "generation_config.json", same)
    assert model_hash(same) == original
    changed = variant(same, "qwen3_moe", lambda ts: {n: t * 1.01 for n, t in ts.items()})
    assert model_hash(changed) != original


def write_header(file: Path, entries: object, data: bytes = b"") -> None:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(begin: object, end: object, shape: object = None, dtype: object = "F32") -> Any:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}


GOOD = entry(0, 8)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": GOOD, "b": entry(8, 15)}, "tensor b has 7 bytes, but .2. of F32 takes 8"),
        ({"a": GOOD, "b": entry(8, 16, [3])}, "tensor b has 8 bytes, but .3. of F32 takes 12"),
        ({"a": GOOD, "b": entry(8, 16, [2], "BF16")}, "tensor b has 8 bytes"),
        ({"a": GOOD, "b": entry(16, 8)}, r"tensor b has the impossible data_offsets \[16, 8\]"),
        ({"a": GOOD, "b": entry(-8, 0)}, r"tensor b has the impossible data_offsets \[-8, 0\]"),
        ({"a": GOOD, "b": entry(8.0, 16)}, "tensor b has the impossible data_offsets"),
        ({"a": GOOD, "b": entry(8, 16, [-2])}, "tensor b has the impossible"),
        ({"a": GOOD, "b": entry(8, 16, "2")}, "tensor b has the impossible"),
        ({"a": GOOD, "b": entry(8, 16, [2], 7)}, "tensor b has the impossible"),
        ({"a": GOOD, "b": entry(8, 8, [0, 2**70])}, "tensor b has the impossible"),
        ({"a": GOOD, "b": {"dtype": "F32"}}, "tensor b has no dtype, shape and data_offsets"),
        ({"a": GOOD, "b": [1]}, "tensor b has no dtype, shape and data_offsets"),
        ({"a": GOOD, "b": entry(0, 8)}, "tensor b overlaps tensor a"),
        ({"a": GOOD, "b": entry(4, 12)}, "tensor b overlaps tensor a"),
        ({"a": entry(8, 16)}, "tensor a leaves a gap after the header"),
        ({"a": GOOD}, "8 bytes after its last tensor"),
        ({"a": GOOD, "x\n" * 999: [1]}, "tensor x.{1,100} has no dtype"),
        ({"a": GOOD, "b": entry(8, 16), "__metadata__": {"x": 1}}, "__metadata__"),
        ([GOOD], "not a safetensors file"),
        (b'{"a":' * 100_000, "nested too deep"),
        (json.dumps({"a": GOOD, "b": entry(8, 16)}).encode("utf-16-le"), "not a safetensors file"),
    ],
)
def test_headers_that_cannot_be_loaded_are_refused(
    tmp_path: Path, entries: object, message: str
) -> None:
    """What passes here, safetensors opens."""
    file = tmp_path / "model.safetensors"
    write_header(file, {"a": GOOD, "b": entry(8, 16)}, bytes(16))
    assert Checkpoint(tmp_path).read("b").tolist() == [0, 0]
    write_header(file, entries, bytes(16))
    with pytest.raises(SafetensorError):
        safe_open(file, framework="pt")
    with pytest.raises(UsageError, match=f"{file}.*{message}") as caught:
        Checkpoint(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_shards_that_are_no_file_or_have_no_sane_header(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for name, message in (("x" * 300, "too long"), ("a\0b", "a"), (".", "not a regular file")):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UsageError, match=message):
            Checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    index.write_text(json.dumps({"weight_map": {"a": "pipe"}}))
    with pytest.raises(UsageError, match="pipe is not a regular file"):
        Checkpoint(tmp_path)
    index.write_text('{"weight_map":' * 100_000)
    with pytest.raises(UsageError, match="nested too deep"):
        Checkpoint(tmp_path)
    index.unlink()
    with (tmp_path / "model.safetensors").open("wb") as data:
        data.write((1 << 39).to_bytes(8, "little"))
        data.truncate(1 << 40)
    with pytest.raises(UsageError, match="not a safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1000}, "has 1000 layers, but the weights hold"),
        ({"num_experts": 16_000}, "have 16000 experts, but the weights hold 8 of layer 0"),
    ],
)
def test_more_layers_or_experts_than_there_are_is_one_problem(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    broken = variant(tmp_path, "qwen3_moe", lambda tensors: tensors, **changes)
    [problem] = audit(Checkpoint(broken), load_config(broken))
    assert str(broken / "config.json") in problem and message in problem


def test_a_layer_without_its_experts_is_one_problem(tmp_path: Path) -> None:
    def strip(tensors: Tensors) -> Tensors:
        fused = fuse(tensors)
        return {name: fused[name] for name in fused if ".2.mlp.experts" not in name}

    broken = variant(tmp_path, "qwen3_moe", strip)
    [problem] = audit(Checkpoint(broken), load_config(broken))
    assert "hold 0 of layer 2" in problem


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    model = variant(tmp_path, "qwen3_moe", lambda tensors: tensors)
    (model / "tokenizer.json").touch(0)
    if os.access(model / "tokenizer.json", os.R_OK):
        pytest.skip("root may read everything")
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read"):
        model_hash(model)
