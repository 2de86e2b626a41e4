#!/usr/bin/env python3
"""check_runpaths.py [--compiler C++] PATH...: where do programs and libraries look for libraries?

Reads every ELF file at or below the paths. An entry of nothing, or a relative one, would be looked up from the folder a
program is started in, so that whoever can write there runs code. With a compiler `tessera` and `tessera-inspect` are also
started in a folder of planted libraries."""

import argparse
import pathlib
import struct
import subprocess
import sys
import tempfile

from sources import report

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB, DT_RPATH, DT_RUNPATH = 0, 1, 5, 15, 29
STARTED = {"tessera": "--version", "tessera-inspect": "--help"}
PLANTED = '#include <unistd.h>\n__attribute__((constructor)) static void run() { _exit(66); }\n'


def dynamic_entries(path):
    """(tag, text) of what an ELF file needs and where it looks for that; none for other files."""
    with path.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":  # 64 bits, little endian
            return None
        file.seek(0)
        header = file.read(64)
        (table,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        file.seek(table)
        segments = [struct.unpack_from("<IIQQQQ", file.read(size)) for _ in range(count)]

        def read(offset, length):
            file.seek(offset)
            return file.read(length)

        def offset_of(address):
            return next(address - start + offset for kind, _, offset, start, _, length in segments
                        if kind == PT_LOAD and start <= address < start + length)

        dynamic = next((read(offset, length) for kind, _, offset, _, _, length in segments if kind == PT_DYNAMIC), b"")
        tags = list(struct.iter_unpack("<qQ", dynamic[:len(dynamic) // 16 * 16]))
        strings = next((offset_of(value) for tag, value in tags if tag == DT_STRTAB), 0)
        found = []
        for tag, value in tags:
            if tag == DT_NULL:
                break
            if tag in (DT_NEEDED, DT_RPATH, DT_RUNPATH):
                found.append((tag, read(strings + value, 1 << 16).split(b"\0", 1)[0].decode()))
        return found


def is_steady(folder):
    return folder.startswith("/") or folder in ("$ORIGIN", "${ORIGIN}") or folder.startswith(("$ORIGIN/", "${ORIGIN}/"))


def check(path):
    for tag, text in dynamic_entries(path) or []:
        if tag == DT_NEEDED:
            if "/" in text and not is_steady(text):
                yield f"{path}: needs '{text}': expected a name or an absolute path"
        elif not all(map(is_steady, text.split(":"))):
            yield f"{path}: RUNPATH '{text}': expected absolute folders and $ORIGIN alone"


def check_started(program, word, compiler):
    """Starts it where every library that it needs lies planted."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "planted.cpp")
        source.write_text(PLANTED)
        for tag, name in dynamic_entries(program):
            if tag == DT_NEEDED and not name.startswith(("ld-", "libc.so", "libtorch", "libc10")):
                subprocess.run([compiler, "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{name}", str(source), "-o",
                                str(pathlib.Path(folder, name))], check=True)
        result = subprocess.run([str(program), word], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode != 0:
            last = (result.stderr.splitlines() or [""])[-1]
            yield f"{program} {word} loads libraries from the current folder: exit code {result.returncode} {last}"


def problems(paths, compiler):
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))
             if file.is_file() and not file.is_symlink()]
    count = 0
    for file in files:
        count += dynamic_entries(file) is not None
        yield from check(file)
        if compiler and file.name in STARTED:
            yield from check_started(file.resolve(), STARTED[file.name], compiler)
    if count == 0:
        yield f"expected programs or libraries in {', '.join(map(str, paths))}, found none"
    print(f"{count} programs and libraries")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler")
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    return report(problems(options.paths, options.compiler))


if __name__ == "__main__":
    sys.exit(main())
