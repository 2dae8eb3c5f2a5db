"""torch-npu as it is without CANN: installed, in the way of `import torch`, and not importable."""

from importlib import metadata
from pathlib import Path

MISSING = "libhccl.so"
_ERROR = f"{MISSING}: cannot open shared object file: No such file or directory"


def install(folder: Path, version: str | None = None, error: str | None = _ERROR) -> Path:
    """Makes a folder for PYTHONPATH. version: by default, torch's own; error: of the import."""
    if version is None:
        version = metadata.version("torch").split("+")[0]
    package = folder / "torch_npu"
    package.mkdir(parents=True)
    code = f"raise ImportError({error!r})\n" if error else f"__version__ = {version!r}\n"
    (package / "__init__.py").write_text(f"{code}\ndef _autoload():\n    pass\n")
    about = folder / f"torch_npu-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder
