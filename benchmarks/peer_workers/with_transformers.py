"""transformers: SDPA, logits of last tokens only, whichever experts and batches are fastest."""

from functools import partial
from typing import Any

import torch
from protocol import batches, fastest, serve
from transformers import AutoModelForCausalLM

# Padded tokens of a batch; 0: one prompt at a time.
_BUDGETS = (0, 1024, 2048, 4096)
_FIRST_BUDGET = 2048
_WASTE = 0.1
# batched_mm is not here: it copies an expert's weights for each token.
_EXPERTS = ("eager", "grouped_mm")


class Transformers:
    def __init__(self, order: dict[str, Any]) -> None:
        torch.set_num_threads(order["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            order["model"], dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        sample = order["sample"]
        tries = {name: partial(self._try, name, _FIRST_BUDGET, sample) for name in _EXPERTS}
        experts = fastest(tries)
        sizes = {str(budget): partial(self._try, experts, budget, sample) for budget in _BUDGETS}
        self._budget = int(fastest(sizes))
        self._model.set_experts_implementation(experts)
        how = f"batches of up to {self._budget} tokens" if self._budget else "one prompt at a time"
        self.setting = f"{experts} experts, {how}"

    def _try(self, experts: str, budget: int, prompts: list[list[int]]) -> None:
        self._model.set_experts_implementation(experts)
        self._run(prompts, budget)

    def prefill(self, prompts: list[list[int]], threads: int) -> list[int]:
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        return self._run(prompts, self._budget)

    @torch.inference_mode()
    def _run(self, prompts: list[list[int]], budget: int) -> list[int]:
        tokens = [0] * len(prompts)
        for group in batches([len(prompt) for prompt in prompts], budget, _WASTE):
            longest = len(prompts[group[0]])
            # Padding comes last, where causal attention lets nothing see it: no mask is needed.
            ids = torch.tensor(
                [prompts[index] + [0] * (longest - len(prompts[index])) for index in group]
            )
            hidden = self._model.model(input_ids=ids, use_cache=False).last_hidden_state
            last = torch.tensor([len(prompts[index]) - 1 for index in group])
            logits = self._model.lm_head(hidden[torch.arange(len(group)), last])
            for index, token in zip(group, logits.argmax(-1).tolist(), strict=True):
                tokens[index] = token
        return tokens


if __name__ == "__main__":
    serve(Transformers)
