"""Reading config.json: families, rope shapes, defaults, and everything that is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.errors import UsageError
from engine.model.architecture import Latent
from engine.model.config import ModelConfig, load_config
from engine.model.fields import MOST_COUNT, MOST_WIDTH
from engine.model.sizes import weight_bytes

QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
}


def read(folder: Path, raw: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return load_config(folder)


def test_qwen3_moe(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.moe_layers == (1,)
    assert config.is_moe(1) and not config.is_moe(3)
    assert config.kv_parts == {"key": (2, 32), "value": (2, 32)}
    assert config.router.normalize is False  # the family's default
    assert read(tmp_path, QWEN, norm_topk_prob=True).router.normalize is True
    assert config.dense_intermediate == 96
    assert config.top_k == 2
    assert config.torch_dtype == "float32"


def test_mixtral_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, MIXTRAL, sliding_window=64, torch_dtype="bfloat16")
    assert config.router.normalize is True
    assert (config.experts, config.top_k, config.rope.theta) == (8, 2, 1e6)
    assert config.sliding_window(1) == 64
    assert config.torch_dtype == "bfloat16"
    assert config.kv_parts["key"] == (2, 16)
    with pytest.raises(IndexError):
        config.sliding_window(2)


def test_deepseek_v3(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK, num_nextn_predict_layers=1, dtype="bfloat16")
    assert config.moe_layers == (1, 2, 3)
    assert config.kv_parts == {"latent": (16,), "rope": (8,)}
    assert config.router.normalize is True
    assert config.router.kind == "sigmoid"
    assert config.shared_intermediate == 96
    assert config.extra_layers == 1
    assert config.torch_dtype == "bfloat16"
    assert isinstance(config.attention, Latent)
    assert config.attention.q_rank is None


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"sliding_window": 16}, None),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, 16),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True}, 4096),
    ],
)
def test_qwen_windows_every_layer_or_none(
    tmp_path: Path, changes: dict[str, Any], window: int | None
) -> None:
    config = read(tmp_path, QWEN, **changes)
    assert [config.sliding_window(layer) for layer in range(4)] == [window] * 4


@pytest.mark.parametrize("raw", [QWEN, MIXTRAL, DEEPSEEK])
def test_defaults_are_those_of_transformers(tmp_path: Path, raw: dict[str, Any]) -> None:
    """What config.json leaves out means what transformers would take it to mean."""
    lean = {key: value for key, value in raw.items() if key not in ("n_group", "topk_group")}
    lean |= {"n_routed_experts": 16} if raw is DEEPSEEK else {}
    lean.pop("num_experts_per_tok", None)
    (tmp_path / "config.json").write_text(json.dumps(lean))
    full = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert load_config(tmp_path) == read(tmp_path, full, num_nextn_predict_layers=0)


YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


def test_both_shapes_of_rope_are_one(tmp_path: Path) -> None:
    old = read(tmp_path, QWEN, rope_theta=5e5, rope_scaling={"type": "yarn", **YARN})
    new = read(tmp_path, QWEN, rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **YARN})
    assert old == new
    assert old.rope.kind == "yarn"
    assert old.rope.attention_factor > 1


def test_rope_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN, rope_scaling=None).rope.theta == 10_000
    stretched = read(tmp_path, QWEN, rope_scaling={"rope_type": "yarn"} | YARN | {"factor": None})
    assert stretched.rope.factor == 2048 / 512


def test_end_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN).eos_token_ids == ()
    assert read(tmp_path, QWEN, eos_token_id=7).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert read(tmp_path, QWEN, eos_token_id=7).eos_token_ids == (8, 9)


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (QWEN, {"model_type": "llama"}, "'llama'.*deepseek_v3, mixtral, qwen3_moe"),
        (QWEN, {"model_type": None}, "known architectures"),
        (QWEN, {"model_type": ["qwen3_moe"]}, "known architectures"),
        (QWEN, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (QWEN, {"hidden_size": None}, "hidden_size is missing"),
        (QWEN, {"hidden_size": "64"}, "hidden_size must be a whole number"),
        (QWEN, {"num_experts": 0}, "num_experts must be a whole number of at least 1"),
        (QWEN, {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        (QWEN, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        (QWEN, {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        (QWEN, {"quantization_config": {"quant_method": "fp8"}}, "quantised weights .fp8."),
        (QWEN, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*yarn"),
        (QWEN, {"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        (QWEN, {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        (QWEN, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between"),
        (QWEN, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN, {"head_dim": 31}, "31 is odd"),
        (QWEN, {"torch_dtype": "int8"}, "torch_dtype 'int8'"),
        (QWEN, {"eos_token_id": "x"}, "eos_token_id must be whole numbers"),
        ({k: v for k, v in DEEPSEEK.items() if k != "q_lora_rank"}, {}, "q_lora_rank is missing"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (DEEPSEEK, {"n_group": 3}, "8 experts cannot form 3"),
        (DEEPSEEK, {"topk_group": 3}, "topk_group 3 of 2 groups"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, raw, **changes)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, QWEN, hidden_act="relu", vocab_size=-1, moe_intermediate_size=None)
    assert str(error.value).count(str(tmp_path / "config.json")) == 3


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_config(tmp_path / "none")
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        load_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("[]")
    with pytest.raises(UsageError, match="JSON object"):
        load_config(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        load_config(file)
    file.write_bytes(b'{"model_type": \n "\xff"}')
    with pytest.raises(UsageError, match="not valid JSON"):
        load_config(tmp_path)
    file.write_text('{"model_type": \n }')
    with pytest.raises(UsageError, match=r"not valid JSON.*line 2"):
        load_config(tmp_path)


def test_reading_a_config_needs_no_torch() -> None:
    code = "import sys, engine.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def too_deep(levels: int = 100_000) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_nested_too_deep_or_too_large(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    file = tmp_path / name
    file.write_text(too_deep())
    with pytest.raises(UsageError, match=rf"{name} is not valid JSON: nested too deep"):
        load_config(tmp_path)
    with file.open("wb") as data:
        data.truncate(1 << 40)
    with pytest.raises(UsageError, match=rf"{name} cannot be read: larger than"):
        load_config(tmp_path)


def test_what_cannot_be_reached_or_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name too long"):
        load_config(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "config.json")  # to read it would wait for ever
    with pytest.raises(UsageError, match="not a regular file"):
        load_config(tmp_path)


def test_a_folder_that_nobody_may_enter(tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "model"
    inner.mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    if os.access(tmp_path / "closed", os.X_OK):
        pytest.skip("root may look everywhere")
    try:
        with pytest.raises(UsageError, match="Permission denied"):
            load_config(inner)
    finally:
        (tmp_path / "closed").chmod(0o700)


@pytest.mark.parametrize("value", [10**31, 10**400, float("inf"), float("nan"), 1e300])
@pytest.mark.parametrize("raw", [QWEN | {"mlp_only_layers": [0]}, MIXTRAL, DEEPSEEK])
def test_numbers_beyond_any_model_are_refused(
    tmp_path: Path, raw: dict[str, Any], value: float
) -> None:
    for key, good in {**raw, "eos_token_id": 1, "rope_theta": 1.0}.items():
        if isinstance(good, int | float):
            with pytest.raises(UsageError, match=key) as caught:
                read(tmp_path, raw, **{key: value})
            assert len(str(caught.value)) < len(str(tmp_path)) + 250


@pytest.mark.parametrize("raw", [QWEN, MIXTRAL, DEEPSEEK])
def test_the_largest_numbers_that_are_accepted_can_be_planned(
    tmp_path: Path, raw: dict[str, Any]
) -> None:
    """No tensor is so large that torch cannot count its bytes."""
    widths = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"), MOST_WIDTH
    )
    ranks = dict.fromkeys(("kv_lora_rank", "q_lora_rank"), MOST_WIDTH)
    counts = dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "head_dim", "qk_nope_head_dim",
         "qk_rope_head_dim", "v_head_dim", "num_experts", "num_local_experts", "n_routed_experts",
         "n_shared_experts"), MOST_COUNT,
    )  # fmt: skip
    config = read(tmp_path, raw, **widths, **ranks, **counts)
    assert weight_bytes(config, "attention", 0, 4) > 2**50
    assert weight_bytes(config, "expert", config.experts, 4) > 2**50


def test_a_stand_in_causes_no_further_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, QWEN, num_attention_heads=0, num_key_value_heads=3, head_dim="x")
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(UsageError) as caught:
        read(tmp_path, DEEPSEEK, n_routed_experts=None, qk_rope_head_dim=None)
    assert len(str(caught.value).splitlines()) == 2


def test_what_is_echoed_is_cut(tmp_path: Path) -> None:
    for changes in (
        {"model_type": "x" * 10**6},
        {"hidden_act": "x\n" * 10**6},
        {"vocab_size": ["x"] * 10**6},
        {"quantization_config": {"quant_method": "x\n" * 10**6}},
        {"rope_scaling": ["x"] * 10**6},
        {"eos_token_id": ["x"] * 10**6},
    ):
        with pytest.raises(UsageError) as caught:
            read(tmp_path, QWEN, **changes)
        assert len(str(caught.value)) < len(str(tmp_path)) + 300
        assert len(str(caught.value).splitlines()) == 1
