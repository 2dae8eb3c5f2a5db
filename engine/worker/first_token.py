"""From logits to what a prefill request asks for: the first token and log-probabilities."""

import torch
from torch import Tensor

from engine.control.messages import Sampling, TokenLogprob


def choose(logits: Tensor, sampling: Sampling) -> int:
    """One token from `logits` [V] float32: the likeliest, or drawn with the request's own seed.

    top_k, then top_p, restrict the choice at temperature > 0, as in vLLM. Equal logits at
    temperature 0: the lowest id.
    """
    if sampling.temperature <= 0:
        return int(logits.argmax())
    values, ids = torch.sort(logits / sampling.temperature, descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probabilities = torch.softmax(values, dim=0)
    # A token stays when those before it have not yet reached top_p; so the first always stays.
    before = probabilities.cumsum(0) - probabilities
    probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
    generator = torch.Generator().manual_seed(sampling.seed)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def token_logprobs(logits: Tensor, token_ids: Tensor, top: int) -> list[list[TokenLogprob]]:
    """For each row: the given token first, then the `top` likeliest by rank.

    logits [n, V] float32; token_ids [n] int64. Log-probabilities are those of the model itself:
    temperature, top_k and top_p do not change them.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    actual = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > actual).sum(dim=1) + 1
    rows = []
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    for token_id, logprob, rank, likeliest, their_ids in zip(
        token_ids.tolist(),
        actual[:, 0].tolist(),
        ranks.tolist(),
        values.tolist(),
        ids.tolist(),
        strict=True,
    ):
        row = [TokenLogprob(token_id, logprob, rank)]
        row += [
            TokenLogprob(other, value, place)
            for place, (other, value) in enumerate(zip(their_ids, likeliest, strict=True), start=1)
        ]
        rows.append(row)
    return rows
