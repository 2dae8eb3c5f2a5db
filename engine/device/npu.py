"""Ascend NPUs through torch-npu, with HCCL for process groups.

Written to torch-npu 2.13.0's sources and documentation and checked against a stand-in that keeps
to them; not run on an Ascend device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed.distributed_c10d import Store

from engine.device import grouped_mlp, npu_operators
from engine.device.base import Device, Kind
from engine.device.fused import register
from engine.errors import RunError

_INDEX = 0  # the only one that the mask lets a rank see
_DOCTOR = "`asapctl doctor` says what this machine has"


class Npu(Device):
    kind: ClassVar[Kind] = "npu"
    backend: ClassVar[str] = "hccl"

    def __init__(self) -> None:
        self.torch_npu = torch_npu = _import()
        try:
            visible = torch_npu.npu.device_count()
            if visible > 0:
                torch_npu.npu.set_device(_INDEX)
                torch_npu.npu.init()
        except RuntimeError as error:
            raise RunError(
                f"the Ascend driver does not open the device: {_first_line(error)}; check it with "
                f"`npu-smi info`; {_DOCTOR}"
            ) from None
        if visible == 0:
            mask = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
            raise RunError(
                "no NPU is visible"
                + ("" if mask is None else f" with ASCEND_RT_VISIBLE_DEVICES={mask}")
                + f"; check the driver with `npu-smi info`; {_DOCTOR}"
            )
        self.torch = torch.device("npu", _INDEX)
        register("npu", npu_operators.operators(torch_npu, triton=_triton_ascend()))

    def new_stream(self) -> Any:
        return self.torch_npu.npu.Stream(device=_INDEX)

    def on_stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.torch_npu.npu.stream(stream)
        return context

    def record(self) -> Any:
        event = self.torch_npu.npu.Event(blocking=True)
        event.record()
        return event

    def wait_event(self, event: Any | None) -> None:
        if event is not None:
            event.wait()

    def synchronize(self, event: Any | None) -> None:
        if event is not None:
            event.synchronize()

    def name(self) -> str:
        return str(self.torch_npu.npu.get_device_name(_INDEX))

    def memory(self) -> tuple[int, int]:
        free, total = self.torch_npu.npu.mem_get_info(_INDEX)
        return int(free), int(total)

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """HCCL connects with the first message, not here: the warm-up of a pair is what waits.

        A send and a receive of the same group share one communicator of P2P_HCCL_BUFFSIZE buffers.
        """
        options = self.torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options._timeout = timeout
        options.is_high_priority_stream = False
        # A group that names no ranks is taken for the job's default one, and RANK_TABLE_FILE for
        # the description of its ranks.
        options.global_ranks_in_group = list(range(size))
        return self.torch_npu._C._distributed_c10d.ProcessGroupHCCL(store, rank, size, options)


def _import() -> Any:
    """torch_npu. To be called after the mask is set, which CANN reads when it is loaded."""
    try:
        return importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        raise RunError(
            f"device npu needs the Python package {error.name}; install what is missing with "
            "`pip install 'asapctl[npu]'`, in the version of torch that is installed "
            f"({torch.__version__})"
        ) from None
    except ImportError as error:
        missing = re.match(r"(\S+\.so[.\d]*): cannot open shared object file", str(error))
        what = f"the library {missing[1]} is not found" if missing else _first_line(error)
        raise RunError(
            f"torch-npu does not load: {what}; install CANN (toolkit, operators and driver) and "
            f"run `source <its folder>/set_env.sh` before asapctl; {_DOCTOR}"
        ) from None
    except Exception as error:  # a build for another torch, or another accelerator in this one
        raise RunError(f"torch-npu does not load: {_first_line(error)}; {_DOCTOR}") from None


def _triton_ascend() -> bool:
    """Whether the installed Triton is the one that compiles for NPUs."""
    try:
        found = importlib.util.find_spec("triton.backends.ascend") is not None
    except ImportError:
        return False
    return found and grouped_mlp.available()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
