#!/usr/bin/env python3
"""Writes the reason of every skipped test into its <skipped message="..."> of a JUnit file made by ctest."""

import re
import sys
import xml.etree.ElementTree as ElementTree

REASONS = (
    re.compile(r": Skipped\n(.*?)\n*\[  SKIPPED \]", re.DOTALL),  # GTEST_SKIP() << reason
    re.compile(r"^skipped: (.*)$", re.MULTILINE),  # tests that are scripts
)


def main(path):
    tree = ElementTree.parse(path)
    for case in tree.iter("testcase"):
        skipped = case.find("skipped")
        if skipped is None:
            continue
        output = case.findtext("system-out") or ""
        reason = next((found.group(1) for found in (regex.search(output) for regex in REASONS) if found), None)
        if reason:
            skipped.set("message", " ".join(reason.split()))
        print(f"skipped: {case.get('name')}: {skipped.get('message')}")
    tree.write(path, encoding="UTF-8", xml_declaration=True)


if __name__ == "__main__":
    main(sys.argv[1])
