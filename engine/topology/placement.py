"""Which expert rank has which experts."""

from itertools import pairwise


def place_experts(total: int, ranks: int) -> tuple[range, ...]:
    """Divides the experts 0..total-1 of every layer over the ranks: consecutive experts, and sizes
    that differ by at most one. Raises ValueError when a rank would have none.
    """
    if not 1 <= ranks <= total:
        raise ValueError(f"{total} experts cannot be placed on {ranks} ranks")
    bounds = [rank * total // ranks for rank in range(ranks + 1)]
    return tuple(range(first, end) for first, end in pairwise(bounds))
