"""The terminal of `asapctl status`: it is given back whole, whenever Ctrl-C comes."""

import io
import os
import signal

import pytest
from rich.console import Console, Group

from asapctl.status_live import _Screen

_ENTER, _LEAVE = "\x1b[?1049h", "\x1b[?1049l"  # the alternate screen


class Interrupted(io.StringIO):
    """Ctrl-C comes in the middle of writing `what`, once."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what: str | None = what

    def write(self, text: str) -> int:
        if self._what is None or self._what not in text:
            return super().write(text)
        self._what = None
        super().write(text[:1])
        os.kill(os.getpid(), signal.SIGINT)
        return super().write(text[1:])


@pytest.mark.parametrize("moment", [_ENTER, "a frame", _LEAVE])
def test_ctrl_c_cuts_nothing(moment: str) -> None:
    file = Interrupted(moment)
    console = Console(file=file, force_terminal=True, width=40, height=5, color_system=None)
    before = signal.getsignal(signal.SIGTSTP)
    with pytest.raises(KeyboardInterrupt), _Screen(console) as screen:
        screen.draw(Group("a frame", "its end"))
    written = file.getvalue()
    assert written.count(_ENTER) == written.count(_LEAVE) == 1
    assert ("its end" in written) == (moment != _ENTER)
    assert signal.getsignal(signal.SIGTSTP) is before
