"""Triton's interpreter for the kernels of engine.device.grouped_mlp, on CPU tensors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

_PACKAGE, _NAME = "engine.device", "grouped_mlp_kernels"


@contextmanager
def interpreted() -> Iterator[ModuleType]:
    """The kernels as they are defined under TRITON_INTERPRET=1. No other code notices: not what
    imported triton before, nor who imports the kernels after.
    """
    with _fresh(TRITON_INTERPRET="1") as kernels:
        yield kernels


@contextmanager
def compiled(cache: Path) -> Iterator[ModuleType]:
    """The kernels as a device gets them; what is compiled is kept in the folder `cache`."""
    with _fresh(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache)) as kernels:
        yield kernels


@contextmanager
def _fresh(**environment: str) -> Iterator[ModuleType]:
    package = importlib.import_module(_PACKAGE)
    module = f"{_PACKAGE}.{_NAME}"
    before = _forget(package, module)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            yield importlib.import_module(module)
    finally:
        _forget(package, module)
        if before is not None:
            sys.modules[module] = before
            setattr(package, _NAME, before)


def _forget(package: ModuleType, module: str) -> ModuleType | None:
    if hasattr(package, _NAME):
        delattr(package, _NAME)
    return sys.modules.pop(module, None)
