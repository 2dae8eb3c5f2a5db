"""How many files, and with them connections, this process may have open."""

import resource


def raise_file_limit() -> None:
    """As far as the system lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
