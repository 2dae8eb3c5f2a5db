"""A prompt computed here, written, loaded as a transformers cache: generation goes on from it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import kv
from engine.errors import UsageError
from engine.kv import load
from engine.kv.export import write_kv
from engine.model.attention import Span
from engine.model.checkpoint import model_hash
from helpers.checkpoints import (
    FAMILIES,
    checkpoint,
    reference_cache,
    reference_logits,
    reference_model,
    token_ids,
)
from helpers.network import Network, Prompt

NEW_TOKENS = 12
TOLERANCE = 1e-5


def exported(name: str, folder: Path, ids: list[int]) -> Path:
    network = Network(checkpoint(name))
    prompt = Prompt(network.attention, ids, keep=True)
    network.step([(prompt, Span(0, len(ids)))])
    path = folder / f"{name}.safetensors"
    metadata = {"model": name, "model_hash": model_hash(checkpoint(name))}
    write_kv(path, prompt.kv.tensors(), ids, metadata)
    return path


def continued(model: PreTrainedModel, ids: list[int], count: int, **options: Any) -> list[int]:
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        # Said outright: generate would take any id that is also the padding's for padding.
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    tokens: list[int] = out[0].tolist()
    return tokens


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("length", [1, 20, 90])
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_from_a_loaded_cache_equals_generate(
    name: str, length: int, tmp_path: Path
) -> None:
    ids = token_ids(length)
    model = reference_model(checkpoint(name))
    expected = continued(model, ids, NEW_TOKENS)
    first = int(reference_logits(checkpoint(name), ids)[-1].argmax())

    cache = kv.load_dynamic_cache(exported(name, tmp_path, ids), checkpoint(name))
    assert cache.get_seq_length() == length
    found = continued(model, [*ids, first], NEW_TOKENS - 1, cache=cache)
    assert found == expected


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_documented_way_works_as_it_is_written(tmp_path: Path) -> None:
    document = Path(__file__).parents[2] / "docs" / "kv-cache.md"
    (code,) = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    name, ids = "qwen3_moe", token_ids(20)
    first = int(reference_logits(checkpoint(name), ids)[-1].argmax())
    result = {
        "kv": {"path": str(exported(name, tmp_path, ids))},
        "choices": [{"prompt_token_ids": ids, "token_ids": [first]}],
    }
    names: dict[str, Any] = {"result": result, "model_dir": checkpoint(name)}
    exec(code, names)
    found = names["out"][0].tolist()
    assert found == continued(reference_model(checkpoint(name)), ids, 21)[: len(found)]
    assert len(found) > len(ids) + 1


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loaded_cache_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    ids = token_ids(90)
    cache = kv.load_dynamic_cache(exported(name, tmp_path, ids), checkpoint(name))
    expected = reference_cache(checkpoint(name), ids)
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        assert type(ours) is type(theirs)
        for found, wanted in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert found.shape == wanted.shape  # windows cropped alike
            assert torch.allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_plain"])
def test_latents_are_expanded_for_a_transformers_that_keeps_keys_and_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the keys and values that transformers' own attention is given."""
    ids = token_ids(30)
    seen = []
    model = reference_model(checkpoint(name))
    attention = type(model.model.layers[0].self_attn)
    if not hasattr(attention, "expand_kv"):
        pytest.skip("this transformers keeps keys and values already; the other tests cover it")
    expand = attention.expand_kv

    def spy(self, latent, rope):
        seen.append(expand(self, latent, rope))
        return seen[-1]

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(attention, "expand_kv", spy)
        model(torch.tensor([ids]))
    monkeypatch.setattr(load, "_caches_latents", lambda: False)
    cache = kv.load_dynamic_cache(exported(name, tmp_path, ids), checkpoint(name))
    for layer, (keys, values) in zip(cache.layers, seen, strict=True):
        assert torch.allclose(layer.keys, keys, rtol=0, atol=TOLERANCE)
        assert torch.allclose(layer.values, values, rtol=0, atol=TOLERANCE)


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    good = exported("mixtral", tmp_path, token_ids(5))
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(good.read_bytes()[:-10])
    anonymous = tmp_path / "anonymous.safetensors"
    write_kv(anonymous, {"layers.0.key": torch.zeros(5, 2, 8)}, token_ids(5))
    for path, model, words in (
        (tmp_path / "none", "mixtral", "no such KV file"),
        (torn, "mixtral", "not a complete safetensors file"),
        (good, "qwen3_moe", r"computed with another checkpoint \(mixtral\)"),
        (anonymous, "mixtral", r"does not fit .* with 3 layers \(layers\.0\.value\)"),
    ):
        with pytest.raises(UsageError, match=words):
            kv.load_dynamic_cache(path, checkpoint(model))
    with pytest.raises(UsageError, match=r"no config\.json"):
        kv.load_dynamic_cache(good, tmp_path)
