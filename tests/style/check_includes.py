#!/usr/bin/env python3
"""Checks every #include against dependencies.txt, so that dependencies between folders go one way; that programs include a
public header of a noun and not its parts; and that headers which need no modules don't bring in all of tessera::nn."""

import pathlib
import re
import sys

from sources import ROOT, cpp_sources

PUBLIC = pathlib.Path("include/tessera")
PROGRAMS = ("benchmarks", "examples", "tests", "tools")
ALL_MODULES = "tessera/nn/modules.h"
WITH_MODULES = ("models.h", "nn.h", "tessera.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def read_table(text):
    """Returns (owner of each public header, folders that each folder may include, itself among them)."""
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    owner = {header: folder for folder, headers, _ in rows for header in headers.split(",")}
    allowed = {}
    for folder, _, direct in rows:  # a row names only folders of rows above it, which also rules out cycles
        names = [] if direct == "-" else direct.split(",")
        allowed[folder] = {folder}.union(*({n} if n == "public" else allowed[n] for n in names))
    return owner, allowed


def target_of(path, bracket, name):
    """The project's file that an #include means, relative to ROOT; none for others' headers."""
    places = [path.parent] if bracket == '"' else []
    for place in [*places, pathlib.Path("src"), pathlib.Path("include"), pathlib.Path("tools")]:
        if (ROOT / place / name).is_file():
            return (ROOT / place / name).resolve().relative_to(ROOT)
    return None


def folder_of(path, owner):
    """The table's row a file belongs to: src/comm/a.h, include/tessera/comm.h and include/tessera/comm/b.h are "comm";
    include/tessera/compile/c.h and include/tessera/detail/compile/d.h are with compile.h."""
    if path.parts[0] == "include" and len(path.parts) > 3:
        noun = path.parts[3] if path.parts[2] == "detail" else path.parts[2]
        return owner.get(f"{noun}.h", noun)
    if path.parts[0] == "include":
        return owner.get(path.name, f"include/tessera/{path.name}")
    return path.parts[1] if path.parts[0] == "src" else path.parts[0]


def check(path, owner, allowed):
    folder = folder_of(path, owner)
    if folder not in allowed:
        yield f"{path}: add {folder} to tests/style/dependencies.txt"
        return
    for bracket, name in INCLUDE.findall((ROOT / path).read_text()):
        target = target_of(path, bracket, name)
        if target is None:
            continue
        public = target.parts[0] == "include"
        to = folder_of(target, owner)
        if path.parts[0] == "include" and not public:
            yield f"{path}: a public header includes the private {name}"
        elif to not in allowed[folder] and not (public and "public" in allowed[folder]):
            yield f"{path}: {folder} may not include {name}, which belongs to {to}"


def check_parts(path):
    for _, name in INCLUDE.findall((ROOT / path).read_text()):
        if name.startswith("tessera/") and name.count("/") > 1 and (ROOT / "include" / name).is_file():
            yield f"{path}: includes <{name}>, a part; take the header of its noun, <tessera/….h>"


def reached(name, seen):
    """Adds the public headers that <name> brings in, itself among them."""
    path = ROOT / "include" / name
    if name in seen or not path.is_file():
        return seen
    seen.add(name)
    for _, included in INCLUDE.findall(path.read_text()):
        reached(included, seen)
    return seen


def check_light():
    for path in sorted((ROOT / PUBLIC).glob("*.h")):
        if path.name not in WITH_MODULES and ALL_MODULES in reached(f"tessera/{path.name}", set()):
            yield f"{PUBLIC / path.name}: brings in <{ALL_MODULES}>, which {' and '.join(WITH_MODULES)} alone may"


def main():
    owner, allowed = read_table((ROOT / "tests/style/dependencies.txt").read_text())
    files = cpp_sources(("include", "src", "tools", "examples"))
    errors = [error for path in files for error in check(path, owner, allowed)]
    errors += [error for path in cpp_sources(PROGRAMS) for error in check_parts(path)]
    errors += check_light()
    print(*errors, f"{len(files)} files, {len(errors)} wrong includes", sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
