"""`python -m tessera --cmake` prints what to give CMake as CMAKE_PREFIX_PATH; all else is the program `tessera`."""

import sys

import _tessera_programs
import tessera

if sys.argv[1:] == ["--cmake"]:
    print(tessera.cmake_prefix_path())
else:
    _tessera_programs.start("tessera", sys.argv[1:])
