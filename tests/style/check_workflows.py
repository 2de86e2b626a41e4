#!/usr/bin/env python3
"""Checks the workflows of hosted CI: that they are YAML, and that each target of make which they name is in the Makefile."""

import pathlib
import re
import sys

from sources import ROOT, report

TARGET = re.compile(r"^([a-z][a-z0-9-]*):", re.MULTILINE)
COMMAND = re.compile(r"\bmake((?: +[\w.=/$-]+)*)")


def commands(value):
    """Every text in what YAML has read, comments left out."""
    if isinstance(value, dict):
        return [text for each in value.values() for text in commands(each)]
    if isinstance(value, list):
        return [text for each in value for text in commands(each)]
    return [value] if isinstance(value, str) else []


def targets_of(command):
    """The targets in `make a b X=1`."""
    return [word for words in COMMAND.findall(command) for word in words.split() if "=" not in word and word[0] != "-"]


def check(root, load):
    known = set(TARGET.findall((root / "Makefile").read_text()))
    for path in sorted((root / ".github/workflows").glob("*.y*ml")):
        name = path.relative_to(root)
        try:
            jobs = (load(path.read_text()) or {}).get("jobs")
        except Exception as error:
            yield f"{name}: {error}"
            continue
        if not isinstance(jobs, dict) or not jobs:
            yield f"{name}: expected jobs"
            continue
        used = {target for command in commands(jobs) for target in targets_of(command)}
        if not used:
            yield f"{name}: expected targets of make"
        for target in sorted(used - known):
            yield f"{name}: the Makefile has no target {target}"


def main():
    try:
        import yaml
    except ImportError:
        print("skipped: python3 has no yaml; apt-get install python3-yaml, or pip install pyyaml")
        return 77
    return report(check(pathlib.Path(ROOT), yaml.safe_load))


if __name__ == "__main__":
    sys.exit(main())
