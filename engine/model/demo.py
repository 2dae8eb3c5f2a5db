"""A small Mixture-of-Experts checkpoint to try things with: Qwen3-MoE with random weights.

It speaks nonsense, but it is a whole checkpoint in Hugging Face layout (about 8 MB) that is
loaded like any other. The seed is fixed: everyone's demo model is the same.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from engine.model.config import load_config
from engine.model.weights import claims

_VOCABULARY = 1024
_SEED = 20260101
_START, _END, _PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 384,
    "max_position_embeddings": 32768,
    "mlp_only_layers": [],
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Enough text for common words to become one token each.
_TEXT = """
A prompt is read before an answer is written. Reading it is called prefill: every token of the
prompt passes through every layer of the model, and the keys and values of attention are kept for
the tokens that follow. Attention looks back over the whole prompt, so its cost grows with the
square of the length; the experts look at one token at a time, so theirs grows with the number of
tokens alone. When both run in step, the long prompts make the short ones wait.

Once upon a time there was a small village by the sea. The people of the village went out in the
morning with their boats and came back in the evening with fish. In the winter, when the wind was
strong and the water was cold, they stayed at home and told each other stories about the summer.
What is the capital of France? The capital of France is Paris. What is the largest ocean? The
largest ocean is the Pacific. How do I write a letter? Begin with the date and the name of the
person you are writing to, then say what you want to say, and end with your own name.

def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

The answer to the question is not always short. Please write a summary of the following text.
Explain the difference between a list and a tuple. Translate the sentence into German. You are a
helpful assistant. user system assistant. 0 1 2 3 4 5 6 7 8 9 10 100 1000 2024 2025 2026
"""


def make_demo_checkpoint(target_dir: Path) -> None:
    """Writes the demo checkpoint to `target_dir`, all of it or nothing.

    Two processes may do so at once: the first to finish wins and both find a whole checkpoint.
    Raises OSError where the folder cannot be written.
    """
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}-", dir=target_dir.parent))
    try:
        tokenizer = _train_tokenizer()
        end = tokenizer.token_to_id(_END)
        write_random_model(
            work, CONFIG | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end}
        )
        _write_json(work / "generation_config.json", {"eos_token_id": end, "do_sample": False})
        tokenizer.save(str(work / "tokenizer.json"))
        _write_json(work / "tokenizer_config.json", _tokenizer_config())
        work.chmod(0o755)
        _publish(work, target_dir)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_random_model(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json and seeded float32 weights for it, in the existing `folder`. No tokenizer."""
    _write_json(folder / "config.json", config)
    save_file(_weights(folder), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(model_dir: Path) -> dict[str, Tensor]:
    """Seeded weights under the names that the model itself asks for."""
    generator = torch.Generator().manual_seed(_SEED)
    wanted = claims({}, load_config(model_dir))
    return {
        name: _random(name, shape, generator)
        for role in ("attention", "expert")
        for name, shape in sorted(wanted[role].items())
    }


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise: Tensor = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.1 * noise  # norms
    if "embed_tokens" in name:
        return noise
    # Keeps features at their size; a head of four times that makes some tokens clearly likelier.
    gain = 4.0 if "lm_head" in name else 1.0
    return noise * (gain / math.sqrt(shape[-1]))


def _train_tokenizer() -> Tokenizer:
    """Byte-level BPE: every text has tokens and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_PAD, _START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": _END,
        "pad_token": _PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": _CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _publish(work: Path, target: Path) -> None:
    for file in work.iterdir():
        with file.open("rb") as data:
            os.fsync(data.fileno())
    try:
        work.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # somebody else's whole checkpoint is as good
            raise
