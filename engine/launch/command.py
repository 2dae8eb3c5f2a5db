"""The command of each node of a launch, for people and for schedulers."""

import shlex
from collections.abc import Sequence

import msgspec

from engine.launch.endpoint import DEFAULT_PORT
from engine.launch.registry import DEFAULT_NAME

# Stand for what is not known while a launch is only looked at.
SOME_ENDPOINT = f"NODE0:{DEFAULT_PORT}"
SOME_SECRET = "SECRET-FILE"


class LaunchCommand(msgspec.Struct, frozen=True):
    """What `asapctl launch` is given on every node alike. secret_file: None where the environment
    has the secret.
    """

    topology: str
    model: str | None = None
    overrides: tuple[str, ...] = ()
    host: str | None = None
    port: int | None = None
    name: str = DEFAULT_NAME
    nnodes: int = 1
    rdzv_endpoint: str = SOME_ENDPOINT
    secret_file: str | None = SOME_SECRET

    def words(self, node_rank: int | str) -> list[str]:
        """The command of one node, a word an argument. node_rank: or what stands for it."""
        words = ["asapctl", "launch", self.topology]
        if self.model is not None:
            words += ["--model", self.model]
        for override in self.overrides:
            words += ["--set", override]
        if self.host is not None:
            words += ["--host", self.host]
        if self.port is not None:
            words += ["--port", str(self.port)]
        if self.name != DEFAULT_NAME:
            words += ["--name", self.name]
        if self.nnodes > 1:
            words += ["--nnodes", str(self.nnodes), "--node-rank", str(node_rank)]
            words += ["--rdzv-endpoint", self.rdzv_endpoint]
            if self.secret_file is not None:
                words += ["--secret-file", self.secret_file]
        return words

    def line(self, node_rank: int) -> str:
        """The command of one node, for a shell."""
        return join(self.words(node_rank))


def join(words: Sequence[str], expanded: Sequence[str] = ()) -> str:
    """A shell's line of `words`; those in `expanded` stay as they are, in double quotes."""
    return " ".join(f'"{word}"' if word in expanded else shlex.quote(word) for word in words)
