"""Python, torch, torch-npu, CANN with HCCL, and the drivers."""

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from engine import __version__
from engine.doctor.facts import Fact, Section, section
from engine.doctor.probe import Imported, probe_torch, probe_torch_npu
from engine.echo import plain
from engine.kernels.build import COMPILERS, find_compiler
from engine.launch.accelerators import count_nodes

_CANN_PLACES = (
    "usr/local/Ascend/cann",
    "usr/local/Ascend/cann/latest",
    "usr/local/Ascend/ascend-toolkit/latest",
)
_DRIVER_LIBRARIES = ("libascend_hal", "libdrv", "libdcmi")
_VERSION = re.compile(
    r"^[\w-]*version\s*=\s*\[?(?:[\w.-]*:)?([\w.-]+)", re.IGNORECASE | re.MULTILINE
)


def read_software(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Section:
    return section(
        "software",
        [
            ("asapctl", _python),
            ("torch", lambda: _torch(probe_torch(environ))),
            ("C++ compiler", lambda: _compiler(environ)),
            ("torch-npu", lambda: _torch_npu(environ)),
            ("CANN", lambda: _cann(environ, root)),
            ("NVIDIA driver", lambda: _nvidia_driver(root)),
            ("Ascend driver", lambda: _ascend_driver(root)),
        ],
    )


def _python() -> Iterator[Fact]:
    yield Fact("asapctl", "ok", __version__, __version__)
    python = platform.python_version()
    yield Fact("python", "ok", f"{python} ({sys.executable})", python)
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Fact("system", "ok", system, system)


def _torch(torch: Imported) -> Iterator[Fact]:
    if torch.error is not None:
        yield Fact(
            "torch",
            "problem",
            f"cannot be imported: {plain(torch.error, 300)}",
            remedy="install it again (pip install --force-reinstall torch); nothing runs without",
        )
        return
    found = torch.found
    yield Fact("torch", "ok", found["version"], found["version"])
    gloo = bool(found.get("gloo"))
    yield Fact(
        "gloo",
        "ok" if gloo else "absent",
        "in torch" if gloo else "torch is built without it",
        gloo,
        None if gloo else "for transport gloo, install torch from PyPI",
    )
    cuda, nccl = found.get("cuda"), found.get("nccl")
    if cuda is None:
        yield Fact("CUDA", "absent", "torch is built without it")
    else:
        yield Fact("CUDA", "ok", f"torch is built for {cuda}", cuda)
    if nccl is None:
        yield Fact("NCCL", "absent", "torch is built without it")
    else:
        yield Fact("NCCL", "ok", f"{nccl}, in torch", nccl)


def _compiler(environ: Mapping[str, str]) -> Iterator[Fact]:
    found = find_compiler(environ)
    if found is None:
        remedy = f"install one of {', '.join(COMPILERS)}: ranks on CPUs are slower without"
        yield Fact("C++ compiler", "absent", "not found", remedy=remedy)
    else:
        yield Fact("C++ compiler", "ok", found, found)


def _torch_npu(environ: Mapping[str, str]) -> Iterator[Fact]:
    try:
        version = metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        yield Fact("torch-npu", "absent", "not installed")
        return
    torch = metadata.version("torch")
    if version.split(".")[:2] != torch.split("+")[0].split(".")[:2]:
        yield Fact(
            "torch-npu",
            "problem",
            f"{version} does not belong to torch {torch}",
            version,
            f"install the release that does: pip install 'torch-npu=={_minor(torch)}.*'",
        )
        return
    imported = probe_torch_npu(environ)
    if imported.error is None:
        yield Fact("torch-npu", "ok", version, version)
        return
    yield Fact(
        "torch-npu",
        "problem",
        f"{version} cannot be imported: {plain(imported.error, 300)}",
        {"version": version, "missing_library": imported.missing},
        _npu_remedy(imported.missing),
    )


def _minor(version: str) -> str:
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


def _npu_remedy(missing: str | None) -> str:
    if missing is None:
        remedy = "see its own message"
    elif missing.startswith(_DRIVER_LIBRARIES):
        remedy = (
            f"{missing} comes with the Ascend driver: install it, or give the container "
            "/usr/local/Ascend/driver, and add its lib64 to LD_LIBRARY_PATH"
        )
    else:
        remedy = f"{missing} comes with CANN: install it, and source its set_env.sh"
    return (
        f"{remedy}. asapctl runs on CPU all the same; other programs can import torch only with "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or without torch-npu"
    )


def _cann(environ: Mapping[str, str], root: Path) -> Iterator[Fact]:
    given = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    if given:
        home = root / given.lstrip("/")
        if not home.is_dir():
            yield Fact(
                "CANN",
                "problem",
                f"ASCEND_HOME_PATH={plain(given)} is no folder",
                remedy="source the set_env.sh of the CANN that is installed",
            )
            return
    else:
        home = next((root / place for place in _CANN_PLACES if (root / place).is_dir()), root)
        if home == root:
            yield Fact("CANN", "absent", "not installed, or its set_env.sh not sourced")
            yield Fact("HCCL", "absent", "comes with CANN")
            return
    version = _cann_version(home)
    text = f"{version or 'version not found'} in {home}"
    if given:
        yield Fact("CANN", "ok", text, version)
    else:
        yield Fact(
            "CANN",
            "problem",
            f"{text}, but ASCEND_HOME_PATH is not set",
            version,
            f"source {home}/set_env.sh, or the one in the folder above",
        )
    libraries = [*home.glob("lib64/libhccl.so"), *home.glob("*-linux/lib64/libhccl.so")]
    if libraries:
        yield Fact("HCCL", "ok", str(libraries[0]), str(libraries[0]))
    else:
        yield Fact("HCCL", "problem", f"no libhccl.so in {home}", remedy="install CANN whole")


def _cann_version(home: Path) -> str | None:
    for pattern in (
        "*-linux/ascend_toolkit_install.info",
        "ascend_toolkit_install.info",
        "version.cfg",
        "share/info/*/version.info",
        "*/version.info",
    ):
        for path in sorted(home.glob(pattern)):
            match = _VERSION.search(path.read_text(errors="replace")[:65536])
            if match:
                return match.group(1)
    return None


def _nvidia_driver(root: Path) -> Iterator[Fact]:
    text = _text(root / "proc/driver/nvidia/version")
    match = re.search(r"Kernel Module\s.*?(\d+\.[\d.]+)", text)
    version = match.group(1) if match else _text(root / "sys/module/nvidia/version").strip()
    if version:
        yield Fact("NVIDIA driver", "ok", version, version)
    elif count_nodes("cuda", root):
        yield Fact("NVIDIA driver", "ok", "loaded; its version is not shown here")
    else:
        yield Fact("NVIDIA driver", "absent", "not loaded")


def _ascend_driver(root: Path) -> Iterator[Fact]:
    folder = root / "usr/local/Ascend/driver"
    match = _VERSION.search(_text(folder / "version.info"))
    if match:
        yield Fact("Ascend driver", "ok", match.group(1), match.group(1))
    elif count_nodes("npu", root):
        yield Fact(
            "Ascend driver",
            "problem",
            f"there are NPUs, but no {folder}/version.info",
            remedy=f"install the driver, or give the container {folder}",
        )
    else:
        yield Fact("Ascend driver", "absent", "not installed")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
