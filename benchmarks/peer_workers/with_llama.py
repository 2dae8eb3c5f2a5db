"""llama.cpp by its own C interface, which takes several prompts in one batch."""

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
from gguf_model import convert
from protocol import batches, fastest, serve

_LONGEST = 4096
_MOST_PROMPTS = 64
# Tokens that are computed at a time, and whether several prompts make up a batch.
_CHOICES = {
    f"micro-batches of {size} tokens, {how}": (size, several)
    for size in (512, 2048)
    for how, several in (("one prompt at a time", False), ("several prompts", True))
}


class LlamaCpp:
    def __init__(self, order: dict[str, Any]) -> None:
        llama.llama_backend_init()
        model = Path(order["model"])
        path = model.with_name(f"{model.name}.{order['dtype']}.gguf")
        if not path.exists():
            convert(model, path, order["dtype"])
        options = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._threads = order["threads"]
        sample = order["sample"]
        # Each opens a context of its own and frees it: together they would hold too much memory.
        took = {name: partial(self._try, name, sample) for name in _CHOICES}
        choice = fastest(took)
        self._open(choice)
        self.setting = f"{order['dtype']}, {choice}"

    def _open(self, choice: str) -> None:
        size, self._several = _CHOICES[choice]
        options = llama.llama_context_default_params()
        options.n_ctx = _LONGEST
        options.n_batch = _LONGEST
        options.n_ubatch = size
        options.n_seq_max = _MOST_PROMPTS
        options.kv_unified = True
        options.n_threads = options.n_threads_batch = self._threads
        self._context = llama.llama_init_from_model(self._model, options)
        self._size = size

    def _try(self, choice: str, prompts: list[list[int]]) -> None:
        self._open(choice)
        self.prefill(prompts, self._threads)
        llama.llama_free(self._context)

    def prefill(self, prompts: list[list[int]], threads: int) -> list[int]:
        tokens = [0] * len(prompts)
        budget = self._size if self._several else 0
        for group in batches([len(prompt) for prompt in prompts], budget, 1.0):
            self._decode([prompts[index] for index in group])
            for index, at in zip(group, self._last, strict=True):
                row = llama.llama_get_logits_ith(self._context, at)
                row = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
                tokens[index] = int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax())
        return tokens

    def _decode(self, prompts: list[list[int]]) -> None:
        """Each prompt a sequence of its own; `_last`: where their last tokens are."""
        total = sum(map(len, prompts))
        batch = llama.llama_batch_init(total, 0, 1)
        batch.n_tokens = total
        at = 0
        self._last = []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = position == len(prompt) - 1
                at += 1
            self._last.append(at - 1)
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        failed = llama.llama_decode(self._context, batch)
        llama.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")


if __name__ == "__main__":
    serve(LlamaCpp)
