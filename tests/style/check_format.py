#!/usr/bin/env python3
"""Checks that clang-format, in the pinned version, leaves every source as it is; with --fix formats them."""

import os
import pathlib
import re
import subprocess
import sys

from sources import ROOT, cpp_sources

SKIPPED = 77
# The environment of one libtorch version has it, too (make test TESSERA_TORCH_VERSION=...).
ENVIRONMENTS = (ROOT / ".venv/bin", pathlib.Path(os.environ.get("TESSERA_PYTHON", sys.executable)).parent)
CLANG_FORMAT = next((path for path in (folder / "clang-format" for folder in ENVIRONMENTS) if path.exists()),
                    ENVIRONMENTS[0] / "clang-format")


def missing():
    """Why the pinned clang-format cannot run; none if it can."""
    pinned = re.search(r"clang-format==(\S+)", (ROOT / "requirements-dev.txt").read_text()).group(1)
    if not CLANG_FORMAT.exists():
        return f"no {CLANG_FORMAT}; `make setup` installs clang-format {pinned}"
    version = subprocess.run([CLANG_FORMAT, "--version"], capture_output=True, text=True).stdout.strip()
    return None if pinned in version else f"expected clang-format {pinned}, found {version}; run `make setup`"


def main(fix):
    reason = missing()
    if reason and (fix or os.environ.get("CI")):
        sys.exit(reason)
    if reason:
        print(f"skipped: {reason}")
        return SKIPPED
    mode = ["-i"] if fix else ["--dry-run", "--Werror", "--ferror-limit=3"]
    return subprocess.run([CLANG_FORMAT, *mode, *cpp_sources()], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(fix="--fix" in sys.argv[1:]))
