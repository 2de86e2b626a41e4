#!/usr/bin/env python3
"""Checks that every requirement of docs/requirements.md has a test that carries its id, in the file that the page names
for it, and that every id in the tests is on the page."""

import re
import sys

from sources import ROOT, report

ROW = re.compile(r"^\| R-(\d{3})\.(\d+) \|", re.MULTILINE)
IN_TEST = re.compile(r"\bR_(\d{3})_(\d+)(?!\d)")
FILE = re.compile(r"\]\(\.\./(tests/[^)]+)\)")


def sections(page):
    """Yields (ids, files of tests) of each section."""
    for text in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        yield set(ROW.findall(text)), FILE.findall(text)


def ids_in(path):
    return set(IN_TEST.findall(path.read_text()))


def check(root):
    known = set()
    for ids, files in sections((root / "docs/requirements.md").read_text()):
        known |= ids
        tested = set().union(*(ids_in(root / file) for file in files))
        for number, test in sorted(ids - tested):
            yield f"docs/requirements.md: R-{number}.{test}: no test in {', '.join(files)} carries the id"
    for path in sorted((root / "tests").glob("*/*_test.cpp")):
        for number, test in sorted(ids_in(path) - known):
            yield f"{path.relative_to(root)}: R_{number}_{test} is not in docs/requirements.md"


if __name__ == "__main__":
    sys.exit(report(check(ROOT)))
