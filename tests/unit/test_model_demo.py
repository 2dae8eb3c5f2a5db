"""The demo checkpoint: whole, the same for everyone, and one that transformers loads."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine.model.checkpoint import Checkpoint, audit, model_hash
from engine.model.config import load_config
from engine.model.demo import make_demo_checkpoint
from helpers.checkpoints import reference_logits
from helpers.network import Network


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "cache" / "demo"
    make_demo_checkpoint(target)
    return target


def test_it_is_a_checkpoint_like_any_other(demo: Path) -> None:
    assert audit(Checkpoint(demo), load_config(demo)) == []
    assert sum(file.stat().st_size for file in demo.iterdir()) < 10e6
    assert [path.name for path in demo.parent.iterdir()] == ["demo"]
    tokenizer = AutoTokenizer.from_pretrained(demo)
    text = "Once upon a time: naïve 漢字 🙂"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    expected = reference_logits(demo, ids)
    error = (Network(demo, ranks=2).logits(ids) - expected).abs().max()
    # Its logits reach 16, where neighbouring float32 numbers are 1e-6 to 2e-6 apart: transformers'
    # own float32 is 1.1e-5 from its float64, and the engine's is 0.9e-5.
    assert error <= 1e-6 * expected.abs().max()
    chat = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert load_config(demo).eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_it_is_the_same_every_time_and_made_whole(demo: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    make_demo_checkpoint(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), state)
    assert model_hash(tmp_path / "again") == model_hash(demo)
    make_demo_checkpoint(tmp_path / "again")  # somebody else was first
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        make_demo_checkpoint(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "file"]
