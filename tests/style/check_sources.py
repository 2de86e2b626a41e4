#!/usr/bin/env python3
"""Checks sizes (a .cpp at most 600 lines, better 400; a header 150), snake_case file names, and forgotten marks."""

import re
import sys

from sources import ROOT, cpp_sources

MOST_LINES = {".h": 150, ".cpp": 600, ".cu": 600}
LONG = 400
MARKS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XXX)\b")


def check(path):
    """Yields (is it an error, what)."""
    lines = (ROOT / path).read_text().splitlines()
    most = MOST_LINES[path.suffix]
    if len(lines) > most:
        yield True, f"{path}: {len(lines)} lines, at most {most}: split it by what it does"
    elif len(lines) > LONG:
        yield False, f"{path}: {len(lines)} lines, better at most {LONG}"
    if not re.fullmatch(r"[a-z0-9_]+", path.stem):
        yield True, f"{path}: expected a snake_case name"
    for number, line in enumerate(lines, 1):
        if MARKS.search(line):
            yield True, f"{path}:{number}: {line.strip()}: do it, or write an issue"


def main():
    found = [(bad, what) for path in cpp_sources() for bad, what in check(path)]
    for bad, what in found:
        print("error:" if bad else "warning:", what)
    return 1 if any(bad for bad, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main())
