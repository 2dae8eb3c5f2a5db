"""The whole examination. Never raises: what cannot be looked at is said to be so."""

import os
from collections.abc import Mapping
from pathlib import Path

from engine.doctor.devices import read_devices
from engine.doctor.facts import Report
from engine.doctor.host import read_host
from engine.doctor.needs import judge_all
from engine.doctor.software import read_software


def examine(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Report:
    """root: where /dev, /proc, /sys and /usr lie. Takes some seconds: torch is imported."""
    software = read_software(environ, root)
    sections = (software, read_devices(environ, root), read_host(environ, root))
    return Report(sections, judge_all(software))
