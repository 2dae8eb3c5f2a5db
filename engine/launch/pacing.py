"""From the `[paced]` section of a topology to the times that its ranks wait."""

from hashlib import sha256

import msgspec

from engine.errors import UsageError
from engine.hardware.load import load_hardware
from engine.hardware.table import Hardware
from engine.topology.schema import Topology

LABEL = "paced: waits instead of computing, its tokens mean nothing"


class Pacing(msgspec.Struct, frozen=True):
    """hardware: scaled, with the links of the policy. table: what the user calls it. scale: by how
    much all its times were multiplied.
    """

    hardware: Hardware
    table: str
    scale: float

    @property
    def mark(self) -> str:
        """Differs where the times do."""
        return f"{self.table} ({sha256(msgspec.msgpack.encode(self)).hexdigest()[:12]})"

    @property
    def note(self) -> str:
        """What has to stand wherever figures of such an instance do."""
        return f"{LABEL} (times of {self.table} x {self.scale:g}: {self.hardware.about})"


def read_pacing(topology: Topology) -> Pacing | None:
    """None where ranks compute. Raises UsageError for a table that cannot be read."""
    if not topology.is_paced:
        return None
    paced = topology.paced
    path = topology.resolve("paced", "hardware", paced.hardware)
    try:
        hardware = load_hardware(paced.hardware, path)
    except UsageError as error:
        where = topology.where("paced", "hardware")
        lines = str(error).splitlines()
        raise UsageError("\n".join(f"{where}: {line}" for line in lines)) from None
    if topology.schedule.policy.startswith("sync"):
        hardware = hardware.in_lockstep()
    return Pacing(hardware.scaled(paced.scale), paced.hardware, paced.scale)
