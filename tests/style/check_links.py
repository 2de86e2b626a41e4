#!/usr/bin/env python3
"""Checks that what the documentation links to in this repository is there, headings of pages included."""

import re
import sys

from sources import ROOT, report

BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def pages():
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def anchor(heading):
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def check(page):
    for link in LINK.findall(CODE.sub("", BLOCK.sub("", page.read_text()))):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: there is no {link}"
        elif heading and heading not in map(anchor, HEADING.findall(BLOCK.sub("", target.read_text()))):
            yield f"{page.relative_to(ROOT)}: there is no such heading: {link}"


def main():
    return report(what for page in pages() for what in check(page))


if __name__ == "__main__":
    sys.exit(main())
