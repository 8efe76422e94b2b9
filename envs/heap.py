"""The C library's heap: one for all threads, and given back after large results.

Idea: every call of a tool runs in a thread, and glibc gives threads heaps of their own, each of which keeps up to twice the
largest block it ever freed. Nothing is referenced any more, and still ten calls that returned 20 MB leave 150 MB resident. With
one heap for all, what is free can be given back. Threads of Python seldom wait for it: they hold the interpreter's lock anyway.
Elsewhere than under glibc both functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys

_ARENA_MAX = -8  # M_ARENA_MAX in malloc.h


@functools.cache
def _library() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def share() -> None:
    """One heap for the threads that begin from now on."""
    if (library := _library()) is not None:
        library.mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """Return what is free to the system."""
    if (library := _library()) is not None:
        library.malloc_trim(0)
