#!/usr/bin/env python3
"""Runs clang-tidy over the files given, else over those that differ from main, else over all.

The compile commands of a g++ build name precompiled headers that clang cannot read: they are taken out first.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("include", "src", "tools", "examples", "tests", "benchmarks")


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else None


def changed_files():
    base = git("merge-base", "HEAD", "main") or git("rev-parse", "HEAD")
    if not base:
        return git("ls-files", "--cached", "--others", "--exclude-standard")
    return git("diff", "--name-only", "--diff-filter=d", base[0]) + git("ls-files", "--others", "--exclude-standard")


def header_command(header, commands):
    """How to compile a header: as a source is that includes it by <>, which has what it needs of others; else as the nearest
    is. Among several, the one with most include folders."""
    public = f"#include <{os.path.relpath(header, ROOT / 'include')}>"
    nearest = max(
        commands,
        key=lambda it: (
            os.path.exists(it["file"]) and public in pathlib.Path(it["file"]).read_text(),
            len(os.path.commonpath([header, it["file"]])),
            len(it["command"]),
        ),
    )
    words = shlex.split(nearest["command"])
    words[words.index(nearest["file"])] = header
    return {**nearest, "file": header, "command": shlex.join([words[0], "-x", "c++-header", *words[1:]])}


def ungrouped(entry):
    """The commands of the sources that a group of them includes (cmake/TesseraUnity.cmake)."""
    file = pathlib.Path(entry["file"])
    if file.parent.name != "groups":
        return [entry]
    sources = [os.path.normpath(file.parent / path) for path in re.findall('#include "(.*)"', file.read_text())]
    return [
        {**entry, "file": source, "command": entry["command"].replace(entry["file"], source)} for source in sources
    ]


def write_commands(build, target, headers):
    grouped = json.loads((build / "compile_commands.json").read_text())
    commands = [each for entry in grouped for each in ungrouped(entry)]
    for entry in commands:
        words = shlex.split(entry["command"])
        compiler = next(i for i, word in enumerate(words) if re.search(r"(\+\+|clang|gcc|cc)(-\d+)?$", word))
        words = [word for word in words[compiler:] if word not in ("-Winvalid-pch", "-fpch-preprocess")]
        while any(word.endswith("cmake_pch.hxx") for word in words):
            at = next(i for i, word in enumerate(words) if word.endswith("cmake_pch.hxx"))
            del words[at - 1 : at + 1]  # -include <header>
        entry["command"] = shlex.join(words)
    commands += [header_command(header, commands) for header in headers]
    target.mkdir(parents=True, exist_ok=True)
    (target / "compile_commands.json").write_text(json.dumps(commands, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()

    files = arguments.files or [
        name for name in changed_files() if name.startswith(FOLDERS) and name.endswith((".h", ".cpp"))
    ]
    commands = arguments.build / "tidy"
    write_commands(arguments.build, commands, [str((ROOT / name).resolve()) for name in files if name.endswith(".h")])

    def check(name):
        command = [ROOT / ".venv/bin/clang-tidy", "-p", commands, "--quiet", "--extra-arg=-Wno-unknown-warning-option"]
        return name, subprocess.run([*command, name], cwd=ROOT, capture_output=True, text=True)

    failed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, done in pool.map(check, files):
            print(f"{'ok  ' if done.returncode == 0 else 'FAIL'} {name}")
            if done.returncode != 0:
                failed.append(name)
                print(done.stdout + done.stderr)
    print(f"clang-tidy: {len(files)} files, {len(failed)} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
