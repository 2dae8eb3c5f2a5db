"""vLLM's CPU build, in this process, without its prefix cache: the same prompts come again."""

import os
from typing import Any

_CACHE_GIB = "2"


class Vllm:
    def __init__(self, order: dict[str, Any]) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB,
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a second process would poll between rounds
            "OMP_NUM_THREADS": str(order["threads"]),
        }
        from vllm import LLM, SamplingParams

        self._llm = LLM(
            order["model"],
            dtype=order["dtype"],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            seed=0,
        )
        self._sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self.prefill(order["sample"], order["threads"])
        self.setting = f"{order['dtype']}, batches of up to 4096 tokens"

    def prefill(self, prompts: list[list[int]], threads: int) -> list[int]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self._llm.generate(inputs, self._sampling, use_tqdm=False)
        return [result.outputs[0].token_ids[0] for result in results]


if __name__ == "__main__":
    from protocol import serve

    serve(Vllm)
