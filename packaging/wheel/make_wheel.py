#!/usr/bin/env python3
"""make_wheel.py BUILD OUTPUT: what `cmake --install BUILD` installs, as a wheel in the folder OUTPUT.

The library, headers, CMake package and programs become the Python package `tessera`, which belongs beside the torch that
they were built with. Equal builds give equal bytes; nothing is fetched, and nothing but CMake and Python is needed."""

import argparse
import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIME = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can tell
PYTHON = ">=3.9"


def cached(build, name):
    """A variable of the build's CMake cache."""
    found = re.search(rf"^{name}:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"make_wheel: expected {name} in {build}/CMakeCache.txt: configure it again")
    return found[1]


def run(*words):
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        sys.exit(f"make_wheel: {' '.join(map(str, words))} failed:\n{result.stdout}")


def keep_one_name(library):
    """A wheel has no links. The file gets the name that programs ask for at run time, libtessera.so.0; libtessera.so,
    for the linker, is a script of it."""
    folder = library.parent
    links = sorted(path for path in folder.glob("libtessera.so*") if path.is_symlink())
    linker_name, *names = links
    for link in links:
        link.unlink()
    name = names[0] if names else library
    library.rename(name)
    linker_name.write_text(f"INPUT({name.name})\n")
    for targets in folder.glob("cmake/Tessera/TesseraTargets-*.cmake"):
        targets.write_text(targets.read_text().replace(library.name, name.name))


def lay_out(build, stage, version):
    """The files of the wheel, but for its own metadata."""
    package = stage / "tessera"
    run("cmake", "--install", build, "--prefix", package, "--strip")
    run("cmake", f"-DPREFIX={package}", "-DTORCH=../torch", "-P", HERE.parent / "relocate.cmake")
    library, = (path for path in package.rglob("libtessera.so*") if not path.is_symlink())
    keep_one_name(library)
    for module in HERE.glob("tessera/*.py"):
        shutil.copyfile(module, package / module.name)
    shutil.copyfile(HERE / "_tessera_programs.py", stage / "_tessera_programs.py")
    torch, kind = re.fullmatch(r".*\+torch([\d.]+)\.(\w+)", version).groups()
    (package / "_version.py").write_text(
        f'VERSION = "{version}"\nTORCH_VERSION = "{torch}"  # what it was built with\nTORCH_KIND = "{kind}"\n')
    return torch


def write_metadata(stage, version, torch, tag):
    """Returns the folder, relative to the stage."""
    folder = pathlib.Path(f"tessera-{version}.dist-info")
    programs = sorted(path.name for path in (stage / "tessera/bin").iterdir())
    texts = {
        "METADATA": f"""Metadata-Version: 2.1
Name: tessera
Version: {version}
Summary: Composable distributed training for C++ on libtorch
License: BSD-3-Clause
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: C++
Requires-Python: {PYTHON}
Requires-Dist: torch =={torch}.*
""",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: make_wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n",
        "entry_points.txt": "[console_scripts]\n" + "".join(f"{name} = _tessera_programs:main\n" for name in programs),
        "top_level.txt": "_tessera_programs\ntessera\n",
        "LICENSE": (ROOT / "LICENSE").read_text(),
    }
    (stage / folder).mkdir()
    for name, text in texts.items():
        (stage / folder / name).write_text(text)
    return folder


def write_wheel(stage, metadata, path):
    """Files by name, what tells of them last; times and owners are not in it."""
    files = sorted(file.relative_to(stage) for file in stage.rglob("*") if file.is_file())
    files.sort(key=lambda file: file.parts[0] == metadata.name)
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:

        def add(name, content, mode):
            entry = zipfile.ZipInfo(name, TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, whose modes these are
            entry.external_attr = (0o100000 | mode) << 16
            wheel.writestr(entry, content)

        for file in files:
            content = (stage / file).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(content)}\n")
            add(str(file), content, 0o755 if os.access(stage / file, os.X_OK) else 0o644)
        record.append(f"{metadata}/RECORD,,\n")
        add(f"{metadata}/RECORD", "".join(record), 0o644)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    arguments = parser.parse_args()
    version = cached(arguments.build, "TESSERA_PACKAGE_VERSION")
    tag = "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        stage = pathlib.Path(folder)
        torch = lay_out(arguments.build.resolve(), stage, version)
        metadata = write_metadata(stage, version, torch, tag)
        path = arguments.output / f"tessera-{version}-{tag}.whl"
        write_wheel(stage, metadata, path)
    print(path)


if __name__ == "__main__":
    main()
