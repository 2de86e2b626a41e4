#!/usr/bin/env python3
"""reference.py OUTPUT: the API reference from the public headers, by doxygen, into OUTPUT/html.

Fails if doxygen warns; without doxygen it prints `skipped: <reason>` and returns 77."""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    if shutil.which("doxygen") is None:
        print("skipped: no doxygen; `make test` and `make docs` install it as root, or apt-get install doxygen")
        return 77
    output = pathlib.Path(sys.argv[1]).resolve()
    shutil.rmtree(output, ignore_errors=True)  # pages of headers that are gone
    output.mkdir(parents=True)
    settings = (ROOT / "docs/Doxyfile.in").read_text().replace("@ROOT@", str(ROOT)).replace("@OUTPUT@", str(output))
    (output / "Doxyfile").write_text(settings)
    code = subprocess.run(["doxygen", str(output / "Doxyfile")]).returncode
    warnings = (output / "warnings.txt").read_text() if (output / "warnings.txt").exists() else ""
    if code != 0 or warnings:
        print(f"{warnings}reference: doxygen ended with {code}")
        return 1
    print(f"{output}/html/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
