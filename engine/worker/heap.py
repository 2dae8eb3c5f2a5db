"""The C library's heap, told to keep what is freed: a rank needs as much again for its next layer.

By default large blocks go back to the system and come back page by page, each cleared and mapped
anew, which costs a rank on a CPU a twentieth of its time.
"""

import ctypes

# <malloc.h> of glibc, and the largest threshold that it accepts on 64-bit machines.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> None:
    """Does nothing where the C library has no such settings."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)
