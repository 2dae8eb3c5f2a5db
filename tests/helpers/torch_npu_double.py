"""Test code: a stand-in for torch-npu on CPU tensors.

It has what engine/device uses of torch-npu and nothing else, under the names and parameters of the
2.13.0 wheel (`PYTHON`, `OPERATORS`: recorded from its sources and its operator registry), computes
what the operators' documentation says, and raises `ForbiddenError` for what it forbids. No proof
that a device agrees with its documentation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import rename_privateuse1_backend

VERSION = "2.13.0"

# Python parameters, without self.
PYTHON: Mapping[str, tuple[str, ...]] = {
    "npu.device_count": (),
    "npu.set_device": ("device",),
    "npu.init": (),
    "npu.get_device_name": ("device_name",),
    "npu.mem_get_info": ("device",),
    "npu.stream": ("stream",),
    "npu.current_stream": ("device",),
    "npu.Stream": ("device", "priority"),
    "npu.Event": ("enable_timing", "blocking", "interprocess"),
}
EVENT: Mapping[str, tuple[str, ...]] = {
    "record": ("stream",),
    "wait": ("stream",),
    "query": (),
    "synchronize": (),
}
# pybind: the constructor (store, rank, size, options), and what can be set on Options.
HCCL = "_C._distributed_c10d.ProcessGroupHCCL"
HCCL_OPTIONS = (
    "_timeout",  # of torch's Backend.Options
    "op_timeout",
    "is_high_priority_stream",
    "global_ranks_in_group",
    "hccl_config",
    "group_id",
)
# As in torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml.
OPERATORS: tuple[str, ...] = (
    "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', "
    "Tensor? rotate=None) -> Tensor",
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, "
    "str input_layout, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
    "float scale=1., float keep_prob=1., int pre_tockens=2147483647, "
    "int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
    'bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None, '
    "Tensor? dropout_mask=None, int seed=0, int offset=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) "
    "-> (Tensor, Tensor, Tensor)",
    "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
    "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, "
    "int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0, "
    "float eps=1e-20) -> (Tensor, Tensor, Tensor)",
    "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
    "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
    "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
    "Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, "
    "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
    "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
    "int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]",
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class ForbiddenError(Exception):
    """The documentation does not allow this."""


def require(allowed: bool, what: str) -> None:
    if not allowed:
        raise ForbiddenError(what)


def torch_npu_double(devices: int = 1) -> Any:
    """A module to be put in sys.modules as torch_npu. `calls` lists the operators that ran, with
    all their arguments; `npu.waits` what streams were made to wait for.
    """
    rename_privateuse1_backend("npu")  # as importing torch_npu does
    module: Any = ModuleType("torch_npu")
    module.__version__ = VERSION
    module.calls = []
    module.npu = _Npu(devices)
    module._C = SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=_hccl(module)))
    for text in OPERATORS:
        name = text.partition("(")[0]
        setattr(module, name, _operator(module, name, torch._C.parse_schema(text)))
    return module


def _operator(module: Any, name: str, schema: Any) -> Any:
    compute = globals()[f"_{name}"]

    def call(*args: Any, **kwargs: Any) -> Any:
        module.npu.check_device()
        given = _bind(schema, args, kwargs)
        module.calls.append((name, given))
        return compute(**given)

    return call


def _bind(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, as the operator registry takes them."""
    given: dict[str, Any] = {}
    names = [argument.name for argument in schema.arguments]
    require(not set(kwargs) - set(names), f"{schema.name} has no {set(kwargs) - set(names)}")
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    require(len(args) <= len(positional), f"{schema.name} takes {len(positional)} by position")
    given.update(zip(positional, args, strict=False))
    require(not set(given) & set(kwargs), f"{schema.name}: given twice")
    given.update(kwargs)
    for argument in schema.arguments:
        if argument.name not in given:
            require(argument.has_default_value(), f"{schema.name} needs {argument.name}")
            given[argument.name] = argument.default_value
        kind, value = str(argument.type), given[argument.name]
        require(_is(kind, value), f"{schema.name}: {argument.name} is no {kind}: {value!r}")
    return given


def _is(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _is(kind[len("Optional[") : -1], value)
    if kind.startswith("List["):
        item = kind[len("List[") : -1]
        return isinstance(value, list | tuple) and all(_is(item, each) for each in value)
    types: dict[str, tuple[type, ...]] = {
        "Tensor": (Tensor,),
        "int": (int,),
        "float": (float, int),
        "bool": (bool,),
        "str": (str,),
    }
    return isinstance(value, types[kind]) and not (kind == "int" and isinstance(value, bool))


def _npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    require(self.dtype in _FLOATS and gamma.dtype == self.dtype, "gamma has the dtype of x")
    require(2 <= self.dim() <= 8, "x has 2 to 8 dimensions")
    require(gamma.shape == self.shape[-gamma.dim() :], "gamma has the last dimensions of x")
    wide = self.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale * gamma.float()).to(self.dtype), scale


def _npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None
) -> Tensor:
    require(self.dim() == r1.dim() == 4 and r1.shape == r2.shape, "4 dimensions, equal angles")
    require(self.dtype in _FLOATS and r1.dtype == r2.dtype == self.dtype, "one floating dtype")
    width = self.shape[-1]
    require(width % 2 == 0 and width < 896 and r1.shape[-1] == width, "even width below 896")
    batch, tokens, heads, _ = self.shape
    require(rotary_mode == "half" and rotate is None, "the stand-in has half alone")
    require(batch < 1000 and heads < 1000, "B and N below 1000")
    allowed = [(1, tokens, 1), (batch, tokens, 1), (batch, tokens, heads)]
    require(tuple(r1.shape[:3]) in allowed, "BSND: angles are 1S1D, BS1D or BSND")
    require(float(r1.abs().max()) <= 1 and float(r2.abs().max()) <= 1, "angles within [-1, 1]")
    first, second = self.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (self.float() * r1.float() + turned * r2.float()).to(self.dtype)


def _npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    **options: Any,
) -> tuple[Any, ...]:
    require(input_layout == "BSND", "the stand-in has BSND alone")
    require(query.dtype in _FLOATS, "float16, bfloat16 or float32")
    require(query.dtype == key.dtype == value.dtype, "one dtype")
    require(key.shape == value.shape, "key and value have one shape")
    (batch, rows, heads, width), keys = query.shape, key.shape[1]
    require(heads == head_num and 1 <= heads <= 256, "1 to 256 heads, as head_num says")
    require(heads % key.shape[2] == 0, "heads are a multiple of key heads")
    require(key.shape[0] == batch and key.shape[-1] == width <= 768, "equal widths up to 768")
    require(1 <= rows <= 1 << 20 and 1 <= keys <= 1 << 20, "1 to 1M positions")
    require(options["keep_prob"] == 1.0 and options["pse"] is None, "no dropout, no pse here")
    require(options["padding_mask"] is None, "padding_mask is not supported")
    mask, mode = options["atten_mask"], options["sparse_mode"]
    require(mask is not None and mode in (3, 4), "the stand-in has sparse_mode 3 and 4 alone")
    require(mask.dtype in (torch.bool, torch.uint8), "the mask is bool or uint8")
    expected = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    require(torch.equal(mask.bool(), expected), "the compressed 2048 x 2048 mask")

    ahead = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    before, after = options["pre_tockens"], options["next_tockens"]
    hidden = ahead > 0 if mode == 3 else (ahead > after) | (ahead < -before)
    require(not bool(hidden.all(-1).any()), "a query that sees nothing")
    key, value = (x.repeat_interleave(heads // x.shape[2], dim=2).float() for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query.float(), key) * options["scale"]
    chances = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", chances, value).to(query.dtype)
    return mixed, chances.amax(-1), chances.sum(-1), torch.empty(0), 0, 0, 0


def _npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    require(x.dtype in _FLOATS and x.dim() in (2, 3) and finished is None, "2 or 3 dimensions")
    require(0 < k <= min(1024, x.shape[-1]), "k up to 1024 and to the experts")
    weights, experts = x.softmax(-1).topk(k)
    return weights, experts.int(), torch.zeros_like(experts, dtype=torch.int32)


def _npu_moe_gating_top_k(
    x: Tensor, k: int, bias: Tensor | None, k_group: int, group_count: int, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    require(x.dtype in _FLOATS and x.dim() == 2 and x.shape[1] <= 2048, "[N, up to 2048]")
    require(options["renorm"] == 0, "renorm is 0")
    require(options["norm_type"] == 1, "the stand-in has sigmoid alone")
    require(options["input_ids"] is None and options["tid2eid"] is None, "no hash mode here")
    require(group_count > 0 and x.shape[1] % group_count == 0, "groups divide the experts")
    size = x.shape[1] // group_count
    require(size > 2 and -(-size // 32) * 32 * group_count <= 2048, "groups: more than 2 experts")
    require(1 <= k_group <= group_count and 1 <= k <= size * k_group, "k fits into the groups")
    scores = x.float().sigmoid()
    biased = scores
    if bias is not None:
        require(
            bias.dtype == x.dtype and bias.shape == x.shape[1:], "a bias an expert, of x's dtype"
        )
        biased = scores + bias.float()
    grouped = biased.view(-1, group_count, size)
    best = 2 if options["group_select_mode"] == 1 else 1
    order = grouped.topk(best, dim=-1).values.sum(-1).argsort(-1, descending=True)
    outside = torch.ones_like(order, dtype=torch.bool).scatter(1, order[:, :k_group], False)
    left = grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)
    experts = left.topk(k).indices
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + options["eps"])
    weights = weights * options["routed_scaling_factor"]
    return weights.to(x.dtype), experts.int(), scores


def _npu_swiglu(self: Tensor, dim: int) -> Tensor:
    require(self.dtype in _FLOATS and 1 <= self.dim() <= 8, "1 to 8 dimensions")
    first, second = self.float().chunk(2, dim=dim)
    return (first * first.sigmoid() * second).to(self.dtype)


def _npu_grouped_matmul(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor | None, **options: Any
) -> list[Tensor]:
    chosen = {name: value for name, value in options.items() if value}
    require(len(x) == len(weight) == 1, "the stand-in has one x, one weight and one output alone")
    require(chosen.pop("split_item", 0) in (2, 3), "one output: split_item 2 or 3")
    require(options["group_type"] == 0 and group_list is not None, "group_type 0 with a list")
    by_size = chosen.pop("group_list_type", 0) == 1
    require(not chosen, f"the stand-in does not have {sorted(chosen)}")
    (rows,), (matrices,) = x, weight
    require(rows.dim() == 2 and matrices.dim() == 3, "x of 2 and weight of 3 dimensions")
    require(rows.dtype in _FLOATS and rows.dtype == matrices.dtype, "one floating dtype")
    require(rows.is_contiguous(), "x cannot be transposed")
    require(matrices.shape[1] == rows.shape[1] < 65_536, "the inner size agrees, below 65536")
    inner = matrices.stride(2) == 1 or matrices.stride(1) == 1
    require(inner and matrices.shape[2] < 65_536, "weight plain or transposed")
    assert group_list is not None
    require(group_list.dtype == torch.int64 and group_list.dim() == 1, "an int64 list")
    require(1 <= len(group_list) == len(matrices) <= 1024, "a group a matrix, up to 1024")
    require(not by_size or len(group_list) > 1, "a list of sizes has more than one")
    ends = group_list.cumsum(0) if by_size else group_list
    sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    require(min(sizes) >= 0, "a list of ends does not fall")
    require(sum(sizes) == rows.shape[0], "the list covers x exactly")
    parts = rows.split(sizes)
    products = [part.float() @ matrix.float() for part, matrix in zip(parts, matrices, strict=True)]
    return [torch.cat(products).to(rows.dtype)]


class _Npu:
    """torch_npu.npu: one process's view of its devices."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.current: int | None = None
        self.waits: list[tuple[Any, Any]] = []
        self._local = threading.local()
        npu = self
        self._default = object()

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                npu.check_device()
                require(device in (None, npu.current), "a stream of the current device")

        class Event:
            def __init__(
                self,
                enable_timing: bool = False,
                blocking: bool = False,
                interprocess: bool = False,
            ) -> None:
                npu.check_device()
                self.stream: Any = None

            def record(self, stream: Any = None) -> None:
                self.stream = npu.current_stream() if stream is None else stream

            def wait(self, stream: Any = None) -> None:
                require(self.stream is not None, "an event is recorded before it is waited for")
                npu.waits.append((npu.current_stream() if stream is None else stream, self))

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                require(self.stream is not None, "an event is recorded before it is waited for")
                npu.waits.append(("host", self))

        self.Stream = Stream
        self.Event = Event

    def check_device(self) -> None:
        require(self.current is not None, "set_device comes before anything on the device")

    def device_count(self) -> int:
        return self.devices

    def set_device(self, device: Any) -> None:
        if not 0 <= device < self.devices:
            raise RuntimeError(f"set device {device} failed, error code is 107001\n[Error]: ...")
        self.current = device

    def init(self) -> None:
        self.check_device()

    def get_device_name(self, device_name: Any = None) -> str:
        return "Ascend910 (stand-in)"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self.check_device()
        return 60 << 30, 64 << 30

    def current_stream(self, device: Any = None) -> Any:
        self.check_device()
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        if stream is not None:
            self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before


def _hccl(module: Any) -> Any:
    class Options:
        __slots__ = HCCL_OPTIONS

    class ProcessGroupHCCL:
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            module.npu.check_device()
            require(isinstance(options._timeout, timedelta), "a timeout")
            require(0 <= rank < size, "a rank of the group")
            self.store, self.rank, self.size, self.options = store, rank, size, options

    ProcessGroupHCCL.Options = Options  # type: ignore[attr-defined]
    return ProcessGroupHCCL
