"""`make ... TESSERA_TORCH_VERSION=2.14.1` has an environment and a build of its own, and leaves .venv and build/release
alone; the versions that are let in are the same everywhere. Python, pip, cmake and ctest are stand-ins that write down how
they were called."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Makes an environment, or installs: then torch is there as pip would put it.
PYTHON = """import pathlib, re, shutil, sys
root, arguments = pathlib.Path({root!r}), sys.argv[2:]
me = pathlib.Path(sys.argv[1])
if arguments[:2] == ["-m", "venv"]:
    bin = pathlib.Path(arguments[-1]) / "bin"
    bin.mkdir(parents=True)
    shutil.copy(root / "path/python3", bin / "python")
elif arguments[:3] == ["-m", "pip", "install"]:
    names = arguments[3:]
    for name in arguments:
        if pathlib.Path(name).exists():
            names[names.index(name)] = " ".join(pathlib.Path(name).read_text().split())
    with open(root / "log", "a") as log:
        print(me.parent.parent.name, "pip", *names, file=log)
    version = re.search(r"torch==(\\d+)\\.(\\d+)\\.(\\d+)", " ".join(names))
    if version:
        torch = me.parent.parent / "lib/python3.11/site-packages/torch"
        header = torch / "include/torch/headeronly/version.h"
        header.parent.mkdir(parents=True)
        parts = zip(("MAJOR", "MINOR", "PATCH"), version.groups())
        header.write_text("".join(f"#define TORCH_VERSION_{{part}} {{number}}\\n" for part, number in parts))
        (torch / "lib").mkdir()
        (torch / "lib/libtorch_cuda.so").touch()
elif arguments[:1] == ["-c"] and "find_spec" in arguments[1]:
    found = list((me.parent.parent / "lib").glob("*/*/torch")) if me.name == "python" else []
    print(found[0].resolve() if found else "")
"""


class MakeWithAVersion(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        shutil.copytree(ROOT / "scripts", self.folder / "scripts")
        for name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
            shutil.copy(ROOT / name, self.folder)
        for name in ("cli11/include/CLI/CLI.hpp", "toml/include/toml++/toml.h", "json/include/nlohmann/json.hpp",
                     "src/googletest/CMakeLists.txt"):
            (self.folder / ".deps" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / ".deps" / name).touch()
        (self.folder / "python.py").write_text(PYTHON.format(root=str(self.folder)))
        self.program("python3", f'exec {sys.executable} {self.folder}/python.py "$0" "$@"')
        for name in ("cmake", "ctest"):
            self.program(name, f'echo {name} "$@" >> {self.folder}/log')
        for name in ("ninja", "g++"):
            self.program(name, "exit 0")
        self.program("id", "echo 1000")  # installs no packages
        (self.folder / "log").touch()

    def program(self, name, text):
        path = self.folder / "path" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def make(self, *arguments):
        """The exit code, what was said, and the calls of pip, cmake and ctest that were new."""
        (self.folder / "log").write_text("")
        result = subprocess.run(["make", "-C", self.folder, "JOBS=1", *arguments], capture_output=True, text=True, check=False,
                                env={"PATH": f"{self.folder}/path:/usr/bin:/bin"})
        return result.returncode, result.stdout + result.stderr, (self.folder / "log").read_text().splitlines()

    def expect_build(self, calls, environment, preset, build):
        torch = self.folder / environment / "lib/python3.11/site-packages/torch"
        self.assertEqual(calls[-2:], [f"cmake --preset {preset} -DTESSERA_TORCH={torch} -G Ninja",
                                      f"cmake --build {build} --parallel 1"])

    def test_an_environment_and_a_build_of_its_own(self):
        status, said, calls = self.make("build", "TESSERA_TORCH_VERSION=2.14.1")
        self.assertEqual(status, 0, said)
        self.assertIn("libtorch 2.14.1 for CUDA, of TESSERA_TORCH_VERSION=2.14.1", said)
        torch, further = calls[:2]
        self.assertEqual(torch, ".venv-2.14.1 pip -q torch==2.14.1")
        self.assertTrue(further.startswith(".venv-2.14.1 pip -q -r clang-format=="), further)
        self.assertNotIn("nvrtc", further)  # the one that this torch came with stays
        self.expect_build(calls, ".venv-2.14.1", "torch", "build/torch-2.14.1")
        self.assertFalse((self.folder / ".venv").exists())
        self.assertEqual(len(self.make("build", "TESSERA_TORCH_VERSION=2.14.1")[2]), 2)  # no further pip

    def test_versions_lie_beside_each_other(self):
        for version in ("2.14.1", "2.15.0"):
            calls = self.make("build", f"TESSERA_TORCH_VERSION={version}")[2]
            self.expect_build(calls, f".venv-{version}", "torch", f"build/torch-{version}")
        _, _, calls = self.make("build")
        self.assertEqual(calls[0], f".venv pip -q {(ROOT / 'requirements.txt').read_text().strip()}")
        self.expect_build(calls, ".venv", "release", "build/release")

    def test_a_version_that_does_not_work_is_not_installed(self):
        status, said, calls = self.make("build", "TESSERA_TORCH_VERSION=2.9.0")
        self.assertNotEqual(status, 0)
        self.assertIn("TESSERA_TORCH_VERSION=2.9.0: expected a version from 2.11 to 2.15", said)
        self.assertEqual(calls, [])

    def test_other_targets_are_refused(self):
        status, said, calls = self.make("build", "bench", "TESSERA_TORCH_VERSION=2.14.1")
        self.assertNotEqual(status, 0)
        self.assertIn("make bench: TESSERA_TORCH_VERSION is for setup, build, test, install, wheel and deb", said)
        self.assertEqual(calls, [])


class Versions(unittest.TestCase):
    def test_are_the_same_everywhere(self):
        def read(name, pattern):
            found = re.findall(pattern, (ROOT / name).read_text())
            self.assertTrue(found, name)
            return set(found)

        header = (ROOT / "src/base/torch_versions.h").read_text()
        low, high = re.search(r"MINOR >= (\d+) && TORCH_VERSION_MINOR <= (\d+)", header).groups()
        said = {f"2.{low} to 2.{high}"}
        for name in ("scripts/find_torch.sh", "cmake/TesseraTorch.cmake", "README.md", "CONTRIBUTING.md", "docs/errors.md",
                     "docs/guide/install.md", "src/comm/gloo/shim/gloo/context.h"):
            self.assertEqual(read(name, r"2\.\d+ to 2\.\d+"), said, name)
        taken = {f"[{low[1]}-{high[1]}]"}
        for name in ("scripts/find_torch.sh", "cmake/TesseraTorch.cmake"):
            self.assertEqual(read(name, r"2(?:\\)+\.1(\[[^]]+\])"), taken, name)
        wheel, = read("packaging/wheel/tessera/_torch.py", r"SUPPORTED = \((.*)\)")
        self.assertEqual(wheel, ", ".join(f'"2.{minor}"' for minor in range(int(low), int(high) + 1)))
        self.assertEqual(read("packaging/spack/packages/tessera/package.py", r"py-torch@(\S+)"), {f"2.{low}:2.{high}"})


if __name__ == "__main__":
    unittest.main()
