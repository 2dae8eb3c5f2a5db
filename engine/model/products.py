"""Products with weights, by the faster of the libraries that torch has for them.

On CPUs torch multiplies float32 by MKL, which takes AVX-512 on Intel's processors only; on others
it runs at half of what the machine can do. oneDNN, which torch has as well, takes what is there.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_CPUS = Path("/proc/cpuinfo")
_INTEL = "GenuineIntel"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times weight [n, k] transposed, plus bias [n]: [..., n]."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.numel():
        return cpu_product()(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """torch's, by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


@cache
def cpu_product() -> Product:
    """What multiplies float32 on this machine: the same in each of its processes, so that a result
    does not depend on which of them computes it.
    """
    return onednn_product() if has_onednn() and not _mkl_is_fast() else F.linear


def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_product() -> Product:
    """As F.linear. The operator is what torch's own compiler calls."""
    operator = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = operator(x, weight, bias, "none", [], "")
        return out

    return product


def _mkl_is_fast() -> bool:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return True
    try:
        return _INTEL in _CPUS.read_text()
    except OSError:
        return True
