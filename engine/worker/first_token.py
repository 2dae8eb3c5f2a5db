"""From logits to what a prefill request asks for: the first token and log-probabilities."""

import torch
from torch import Tensor

from engine.control.messages import Sampling, TokenLogprob
from engine.errors import RunError


def choose(logits: Tensor, sampling: Sampling) -> int:
    """One token from `logits` [V] float32: the likeliest, or drawn with the request's own seed.

    top_k, then top_p, restrict the choice at temperature > 0, as in vLLM. Equal logits at
    temperature 0: the lowest id. RunError: there is no choice, since logits are not finite.
    """
    check_finite(logits)
    if sampling.temperature <= 0:
        return int(logits.argmax())
    values, ids = torch.sort(logits.double(), descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    # Relative to the likeliest, so that a very low temperature means greedy and not infinity.
    probabilities = torch.softmax((values - values[0]) / sampling.temperature, dim=0)
    # A token stays when those before it have not yet reached top_p.
    dropped = probabilities.cumsum(0) - probabilities >= sampling.top_p
    dropped[0] = False
    probabilities.masked_fill_(dropped, 0.0)
    generator = torch.Generator().manual_seed(sampling.seed)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def check_finite(logits: Tensor) -> None:
    """RunError when any logit is NaN or infinite: nothing that follows would mean anything."""
    if not bool(logits.isfinite().all()):
        raise RunError(
            "the model's logits are not finite: its weights hold NaN or infinity, or overflow in "
            "this dtype"
        )


def token_logprobs(logits: Tensor, token_ids: Tensor, top: int) -> list[list[TokenLogprob]]:
    """For each row: the given token first, then the `top` likeliest by rank.

    logits [n, V] float32; token_ids [n] int64. Log-probabilities are those of the model itself:
    temperature, top_k and top_p do not change them. RunError: logits are not finite.
    """
    check_finite(logits)
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
