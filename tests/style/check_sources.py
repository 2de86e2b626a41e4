#!/usr/bin/env python3
"""Checks sizes (a .cpp at most 600 lines, better 400; a header 150), snake_case file names, forgotten marks, and calls
that are refused for what they do."""

import re
import sys

from sources import ROOT, cpp_sources

MOST_LINES = {".h": 150, ".cpp": 600, ".cu": 600}
LONG = 400
MARKS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XXX)\b")

# (folders, what must not be there, what to do instead)
REFUSED = (
    (("tests",), re.compile(r"\brandom_device\b"), "draw from test_seed() of support/random.h, so that a run can be repeated"),
    (("src", "tools", "benchmarks"), re.compile(r"\b(strto(d|f|ld)|sto(d|f|ld)|atof)\s*\("),
     "read numbers exactly, by std::from_chars or parse_number() of tools/numbers.h"),
    (("tools", "benchmarks"), re.compile(r"\bCLI::(Range|PositiveNumber|NonNegativeNumber|Number)\b"),
     "use add_number() of tools/numbers.h: CLI11 rounds twice and does not tell the range"),
)


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
        for folders, pattern, remedy in REFUSED:
            if path.parts[0] in folders and pattern.search(line):
                yield True, f"{path}:{number}: {line.strip()}: {remedy}"


def main():
    found = [(bad, what) for path in cpp_sources() for bad, what in check(path)]
    for bad, what in found:
        print("error:" if bad else "warning:", what)
    return 1 if any(bad for bad, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main())
