"""Errors that a user can act on.

Everything that a user may cause (a bad file, an impossible topology, too little memory)
is raised as one of these, with a message that says what is wrong, where, and what to do.
The command line prints the message alone; any other exception is a defect and keeps its
traceback.
"""


class AsapError(Exception):
    """Base of all errors whose message is written for the user."""

    exit_code = 1


class UsageError(AsapError):
    """The request itself cannot be carried out as given: arguments, topology, model, input."""

    exit_code = 2


class RunError(AsapError):
    """A run that started could not finish: a rank died, the disk is full."""

    exit_code = 1
