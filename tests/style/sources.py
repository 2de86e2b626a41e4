"""The project's sources, for the checks in this folder, and how these tell what they found."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("include", "src", "tools", "examples", "tests", "benchmarks")


def cpp_sources(folders=FOLDERS):
    """Every .h, .cpp and .cu below these folders, as sorted paths relative to ROOT."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(path.relative_to(ROOT) for path in found if path.suffix in (".h", ".cpp", ".cu"))


def report(problems):
    """Prints them; returns the exit code."""
    found = list(problems)
    for what in found:
        print("error:", what)
    return 1 if found else 0
