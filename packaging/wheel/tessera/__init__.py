"""Tessera's library, headers, CMake package and programs, beside the torch that they were built with.

`python -m tessera --cmake` prints what CMake needs to find them. Programs are written in C++: there are no bindings.
Importing this fails where torch does not fit, with what would; torch itself is not imported."""

import sys

from tessera._torch import check, cmake_prefix_path
from tessera._version import VERSION as __version__

__all__ = ["__version__", "cmake_prefix_path"]
try:
    check()
except ImportError as error:
    if sys.argv[0] == "-m":  # python -m tessera: a command, which says so in a line
        sys.exit(f"error: {error}")
    raise
