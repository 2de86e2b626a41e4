#!/usr/bin/env python3
"""Compiles the sources of a build, or the files given, with another compiler as far as their syntax goes: what would not
compile for another processor is found without a libtorch for it. Headers are those of the build's libtorch."""

import argparse
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
OF_THE_PROCESSOR = re.compile(r"-m(avx|f16c|sse|arch|tune)")  # of this machine's


def words_of(entry, compiler):
    """The command with another compiler, without precompiled headers and without what it writes."""
    words = shlex.split(entry["command"])
    at = next(i for i, word in enumerate(words) if re.search(r"(\+\+|clang|gcc|cc)(-\d+)?$", word))
    words = words[at + 1 :]
    kept = []
    while words:
        word = words.pop(0)
        if word in ("-o", "-MF", "-MT") or (word == "-include" and words[0].endswith("cmake_pch.hxx")):
            words.pop(0)
        elif word not in ("-c", "-MD", "-Winvalid-pch", "-fpch-preprocess") and not OF_THE_PROCESSOR.match(word):
            kept.append(word)
    # Header-only dependencies of the machine's, behind the headers that the compiler brings.
    return [compiler, "-fsyntax-only", *kept, "-idirafter", "/usr/include"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("files", nargs="*", help="sources, or groups of the build; default: all of src and tools")
    arguments = parser.parse_args()
    if shutil.which(arguments.compiler) is None:
        sys.exit(f"check_syntax: there is no {arguments.compiler}; Debian has it in g++-aarch64-linux-gnu")

    entries = json.loads((arguments.build / "compile_commands.json").read_text())
    wanted = {str((ROOT / name).resolve()) for name in arguments.files}
    folders = [top / folder for top in (arguments.build, ROOT) for folder in ("src", "tools")]
    chosen = [
        entry
        for entry in entries
        if (entry["file"] in wanted if wanted else any(pathlib.Path(entry["file"]).is_relative_to(f) for f in folders))
        and not entry["file"].endswith("cmake_pch.hxx.cxx")
    ]
    if not chosen or len(wanted) > len(chosen):
        sys.exit("check_syntax: expected sources that the build compiles, by themselves or as groups of it")

    def check(entry):
        done = subprocess.run(words_of(entry, arguments.compiler), cwd=entry["directory"], capture_output=True, text=True)
        return entry["file"], done

    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, done in pool.map(check, chosen):
            failed += done.returncode != 0
            print("ok  " if done.returncode == 0 else "FAIL", pathlib.Path(name).relative_to(ROOT))
            print(done.stderr, end="", flush=True)
    print(f"{arguments.compiler}: {len(chosen)} sources, {failed} that do not compile")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
