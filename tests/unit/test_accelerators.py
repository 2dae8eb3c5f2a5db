import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.launch.accelerators import (
    MASKS,
    Accelerators,
    Kind,
    Slot,
    assign,
    assumed,
    mask_environment,
    read_accelerators,
)

MIB = 1 << 20
UUIDS = ["GPU-aaaa1111-0000", "GPU-aabb2222-0000"]
NPU_SMI = """
+----------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3                 Version: 24.1.rc3                                     |
+---------------------------+---------------+--------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)  Hugepages-Usage(page) |
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB) HBM-Usage(MB) |
+===========================+===============+============================================+
| 0     910B3               | OK            | 93.4        36           0    / 0          |
| 0                         | 0000:C1:00.0  | 0           0    / 0     3161 / 65536      |
+===========================+===============+============================================+
| 1     910B3               | OK            | 93.4        36           0    / 0          |
| 0                         | 0000:C2:00.0  | 0           0    / 0     3161 / 32768      |
+===========================+===============+============================================+
"""


def machine(root: Path, *names: str) -> Path:
    (root / "dev").mkdir()
    for name in names:
        (root / "dev" / name).touch()
    return root


def gpus(root: Path, count: int) -> Path:
    return machine(root, "nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count)))


def npus(root: Path, count: int) -> Path:
    return machine(root, "davinci_manager", *(f"davinci{index}" for index in range(count)))


def tool(folder: Path, name: str, prints: str) -> dict[str, str]:
    """An environment in which the program `name` prints that."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable}\nprint({prints!r})\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": str(folder)}


def test_only_the_files_of_devices_count(tmp_path: Path) -> None:
    root = machine(tmp_path, "nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm", "davinci_manager")
    assert read_accelerators("cuda", {}, root) == Accelerators("cuda", 2, ("0", "1"), None, None)
    assert read_accelerators("npu", {}, root) == Accelerators("npu", 0, (), None, None)
    assert read_accelerators("cpu", {}, root).visible == ()
    assert read_accelerators("cuda", {}, tmp_path / "nothing").present == 0


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        ("2,0", ("2", "0")),
        (" 1 , 3", ("1", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,2", ("1",)),
        ("GPU-aaaa,GPU-aabb", ("GPU-aaaa", "GPU-aabb")),
        ("MIG-1/2/3", ("MIG-1/2/3",)),
    ],
)
def test_a_cuda_mask_is_honoured_as_it_is_spelled(
    tmp_path: Path, mask: str, visible: tuple[str, ...]
) -> None:
    found = read_accelerators("cuda", {"CUDA_VISIBLE_DEVICES": mask}, gpus(tmp_path, 4))
    assert (found.present, found.visible, found.mask) == (4, visible, mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("0,4", "there is no device 4; there are 0 to 3"),
        ("1,01", "names 01 twice"),
        ("GPU-aaaa,GPU-aaaa1", "names GPU-aaaa1 twice"),
        ("0,GPU-aaaa", "mixes numbers and UUIDs"),
        ("0;1", '"0;1" is neither a number nor a UUID'),
        ("9" * 5000, "neither a number"),
    ],
)
def test_a_cuda_mask_that_cannot_be_is_refused(tmp_path: Path, mask: str, message: str) -> None:
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=") as refused:
        read_accelerators("cuda", {"CUDA_VISIBLE_DEVICES": mask}, gpus(tmp_path, 4))
    assert message in str(refused.value)


def test_an_ascend_mask_is_honoured(tmp_path: Path) -> None:
    root = npus(tmp_path, 4)
    for mask, visible in (("1,3", ("1", "3")), ("", ()), ("-1", ())):
        found = read_accelerators("npu", {"ASCEND_RT_VISIBLE_DEVICES": mask}, root)
        assert (found.present, found.visible) == (4, visible)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("3,1", "must ascend, each once; write 1,3"),
        ("1,1", "must ascend, each once; write 1"),
        ("1, 2", '" 2" is no device number'),
        ("1,2,-1", '"-1" is no device number'),
        ("0,4", "there is no device 4; there are 0 to 3"),
    ],
)
def test_an_ascend_mask_that_cannot_be_is_refused(tmp_path: Path, mask: str, message: str) -> None:
    with pytest.raises(UsageError, match="ASCEND_RT_VISIBLE_DEVICES=") as refused:
        read_accelerators("npu", {"ASCEND_RT_VISIBLE_DEVICES": mask}, npus(tmp_path, 4))
    assert message in str(refused.value)


def test_a_mask_where_there_is_no_device_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no device was found here"):
        read_accelerators("cuda", {"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)


def test_memory_is_the_smallest_gpu_that_may_be_used(tmp_path: Path) -> None:
    root = gpus(tmp_path, 2)
    environ = tool(tmp_path / "bin", "nvidia-smi", f"{UUIDS[0]}, 81920\n{UUIDS[1]}, 4096")
    assert read_accelerators("cuda", environ, root).memory_bytes == 4096 * MIB
    for mask, order, size in (
        ("GPU-aaaa", "", 81920),
        ("0", "PCI_BUS_ID", 81920),
        ("0", "", 4096),  # CUDA's own order is not nvidia-smi's
    ):
        masked = {**environ, "CUDA_VISIBLE_DEVICES": mask, "CUDA_DEVICE_ORDER": order}
        assert read_accelerators("cuda", masked, root).memory_bytes == size * MIB
    part = {**environ, "CUDA_VISIBLE_DEVICES": "MIG-1"}
    assert read_accelerators("cuda", part, root).memory_bytes is None
    with pytest.raises(UsageError, match="there is no device GPU-cccc"):
        read_accelerators("cuda", {**environ, "CUDA_VISIBLE_DEVICES": "GPU-cccc"}, root)


def test_memory_of_npus_is_read_from_the_table(tmp_path: Path) -> None:
    root = npus(tmp_path, 2)
    environ = tool(tmp_path / "bin", "npu-smi", NPU_SMI)
    assert read_accelerators("npu", environ, root).memory_bytes == 32768 * MIB
    masked = {**environ, "ASCEND_RT_VISIBLE_DEVICES": "0"}
    assert read_accelerators("npu", masked, root).memory_bytes == 65536 * MIB


def test_a_tool_that_fails_or_cannot_run_leaves_memory_unknown(tmp_path: Path) -> None:
    root = gpus(tmp_path, 1)
    environ = tool(tmp_path / "bin", "nvidia-smi", "")
    program = tmp_path / "bin" / "nvidia-smi"
    for text in (f"#!{sys.executable}\nraise SystemExit(9)\n", "#!/no/such/program\n", ""):
        program.write_text(text)
        assert read_accelerators("cuda", environ, root).memory_bytes is None


def test_ranks_get_devices_in_order_and_as_the_mask_spells_them() -> None:
    there = {
        "cuda": Accelerators("cuda", 4, ("2", "0"), None, "2,0"),
        "npu": assumed("npu", 1, None),
    }
    slots = assign(["cuda", "cpu", "npu", "cuda"], there)
    assert slots == (Slot("cuda", 0, "2"), None, Slot("npu", 0, "0"), Slot("cuda", 1, "0"))
    assert mask_environment(slots[3]) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert mask_environment(slots[2]) == {"ASCEND_RT_VISIBLE_DEVICES": "0"}
    assert mask_environment(None) == {}


def test_too_few_devices_are_refused_with_both_counts_for_each_kind() -> None:
    there = {"cuda": Accelerators("cuda", 8, ("2", "0"), None, "2,0")}
    with pytest.raises(UsageError) as refused:
        assign(["cuda", "cuda", "cuda", "npu"], there)
    of_cuda, of_npu = str(refused.value).splitlines()
    assert "3 cuda devices are wanted" in of_cuda
    assert "2 visible of 8 (CUDA_VISIBLE_DEVICES=2,0)" in of_cuda
    assert "1 npu device is wanted" in of_npu
    assert "0 visible" in of_npu


@given(
    st.lists(st.sampled_from(["cpu", "cuda", "npu"]), max_size=40),
    st.dictionaries(
        st.sampled_from(["cuda", "npu"]), st.sets(st.integers(0, 63), max_size=24), min_size=0
    ),
)
def test_no_device_is_ever_given_to_two_ranks(
    kinds: list[Kind], masks: dict[Kind, set[int]]
) -> None:
    there = {
        kind: Accelerators(kind, 64, tuple(map(str, sorted(numbers))), None, None)
        for kind, numbers in masks.items()
    }
    enough = all(kinds.count(kind) <= len(masks.get(kind, ())) for kind in MASKS)
    try:
        slots = assign(kinds, there)
    except UsageError:
        assert not enough
        return
    assert enough
    assert [slot.kind if slot else "cpu" for slot in slots] == kinds
    given_away = [tuple(mask_environment(slot).items()) for slot in slots if slot]
    assert len(set(given_away)) == len(given_away)
    assert all(slot.visible in there[slot.kind].visible for slot in slots if slot)


def test_the_environment_is_the_processes_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_accelerators("cuda").visible == ()
