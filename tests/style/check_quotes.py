#!/usr/bin/env python3
"""Checks that code in the documentation is what it says to be: lines of a file that is compiled and tested.

    <!-- examples/07_tutorial.cpp -->          before a block of cpp: these lines, in a row, byte for byte; a line
                                               "// ..." stands for those that are left out;
                                               of diff: hunks, split by lines that begin with @@, both sides of each
    <!-- after: examples/07_tutorial.cpp -->   of diff: the side after the change alone

A page that quotes at all marks each of its blocks of cpp and diff."""

import re
import sys

from sources import ROOT, report

MARK_TEXT = r"^<!-- (?P<after>after: )?(?P<source>[\w./]+\.(?:cpp|h)) -->\n"
MARK = re.compile(MARK_TEXT, re.MULTILINE)
BLOCK = re.compile(rf"(?:{MARK_TEXT})?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def pages():
    return sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def runs(kind, text, after):
    """The runs of lines that a block says to be in the file."""
    lines = text.splitlines()
    hunks = [[]]
    for line in lines:
        is_border = line.startswith("@@") if kind == "diff" else line.strip() == "// ..."
        hunks.append([]) if is_border else hunks[-1].append(line)
    if kind != "diff":
        return hunks
    sides = ("+ ",) if after else ("+ ", "- ")
    return [[line[1:] for line in hunk if line[:1] in side or not line] for side in sides for hunk in hunks if hunk]


def has_run(lines, run):
    return any(lines[start : start + len(run)] == run for start in range(len(lines) - len(run) + 1))


def check(page):
    text = (ROOT / page).read_text()
    if not MARK.search(text):
        return
    blocks = list(BLOCK.finditer(text))
    if len(MARK.findall(text)) != sum(block["source"] is not None for block in blocks):
        yield f"{page}: a mark without a block of code right after it"
    for block in blocks:
        place = f"{page}:{text.count(chr(10), 0, block.start('text')) + 1}"
        if block["source"] is None:
            if block["kind"] in ("cpp", "diff"):
                yield f"{place}: expected a mark, as <!-- examples/07_tutorial.cpp -->, before the block"
            continue
        path = ROOT / block["source"]
        if not path.is_file():
            yield f"{place}: there is no {block['source']}"
            continue
        lines = path.read_text().splitlines()
        for run in runs(block["kind"], block["text"], block["after"]):
            if not has_run(lines, run):
                yield f"{place}: these are no lines of {block['source']}:\n" + "\n".join(run)


def main():
    return report(what for page in pages() for what in check(page))


if __name__ == "__main__":
    sys.exit(main())
