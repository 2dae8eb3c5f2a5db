"""One thread for each process of a test run: the tests start many processes on few cores."""

import os
import sys

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every rank

# The machines that run the tests are shared; a slow example is no failure.
settings.register_profile("asapctl", deadline=None)
settings.load_profile("asapctl")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """OMP_NUM_THREADS does not rule every backend; set torch itself where it is in use."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
