"""Recipes can be read and have the project's version; equal trees make equal wheels; the wheel's Python side knows which
versions of libtorch there are."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

from check_runpaths import DT_RUNPATH, dynamic_entries
from sources import ROOT

PACKAGING = ROOT / "packaging"
sys.path.insert(0, str(PACKAGING / "wheel"))
import make_wheel

try:
    import yaml
except ImportError:
    yaml = None


COMPILER = shutil.which("c++") or shutil.which("g++")


class Recipes(unittest.TestCase):
    def test_python_compiles(self):
        for path in PACKAGING.rglob("*.py"):
            ast.parse(path.read_text(), str(path))

    def test_shell_can_be_read(self):
        subprocess.run(["bash", "-n", PACKAGING / "conda-forge/build.sh"], check=True)

    def test_conda_forge_has_the_projects_version(self):
        version = re.search(r"^project\(Tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)[1]
        torch = re.search(r"^torch==(\d+\.\d+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
        text = (PACKAGING / "conda-forge/recipe.yaml").read_text()
        self.assertIn(f"\n  version: {version}\n", text)
        self.assertIn(f'\n  libtorch: "{torch}"\n', text)

    @unittest.skipUnless(yaml, "no PyYAML")
    def test_yaml_can_be_read(self):
        recipe = yaml.safe_load((PACKAGING / "conda-forge/recipe.yaml").read_text())
        self.assertEqual(recipe["package"]["name"], "tessera")
        self.assertTrue(yaml.safe_load((PACKAGING / "spack/repo.yaml").read_text()))

    def test_versions_of_libtorch_are_those_of_the_build(self):
        known = re.search(r"^SUPPORTED = (.*)$", (PACKAGING / "wheel/tessera/_torch.py").read_text(), re.MULTILINE)[1]
        first, *_, last = ast.literal_eval(known)
        self.assertIn(f"needs libtorch {first} to {last}:", (ROOT / "cmake/TesseraTorch.cmake").read_text())


class Wheel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name):
        stage = self.folder / name
        (stage / "tessera/bin").mkdir(parents=True)
        (stage / "tessera/bin/tessera").write_text("program")
        (stage / "tessera/bin/tessera").chmod(0o700)
        (stage / "tessera/__init__.py").write_text("")
        metadata = make_wheel.write_metadata(stage, "1.0+torch2.13.cpu", "2.13", "py3-none-linux_x86_64")
        make_wheel.write_wheel(stage, metadata, self.folder / f"{name}.whl")
        return self.folder / f"{name}.whl"

    def test_equal_trees_give_equal_bytes(self):
        self.assertEqual(self.write("one").read_bytes(), self.write("two").read_bytes())

    def test_a_build_that_knows_of_no_packages_is_refused(self):
        (self.folder / "CMakeCache.txt").write_text("TESSERA_TORCH:PATH=/torch\n")
        with self.assertRaisesRegex(SystemExit, "expected TESSERA_PACKAGE_VERSION in .*: configure it again"):
            make_wheel.cached(self.folder, "TESSERA_PACKAGE_VERSION")

    def test_every_file_is_recorded_and_programs_can_be_started(self):
        with zipfile.ZipFile(self.write("one")) as wheel:
            names = wheel.namelist()
            record = wheel.read("tessera-1.0+torch2.13.cpu.dist-info/RECORD").decode()
            self.assertEqual([line.split(",")[0] for line in record.splitlines()], names)
            self.assertEqual(wheel.getinfo("tessera/bin/tessera").external_attr >> 16 & 0o777, 0o755)
            self.assertEqual(wheel.getinfo("tessera/__init__.py").external_attr >> 16 & 0o777, 0o644)
            metadata = wheel.read("tessera-1.0+torch2.13.cpu.dist-info/METADATA").decode()
            self.assertIn("\nRequires-Dist: torch ==2.13.*\n", metadata)


@unittest.skipUnless(COMPILER and shutil.which("cmake"), "no C++ compiler or no CMake")
class Relocate(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.prefix = pathlib.Path(folder.name).resolve() / "prefix"
        for name in ("bin", "lib64/cmake"):
            (self.prefix / name).mkdir(parents=True)
        self.config = self.prefix / "lib64/cmake/TesseraConfig.cmake"
        self.config.write_text('#\nset(TESSERA_TORCH_OF_BUILD "/home/somebody/torch")\n')

    def build(self, name, *options):
        path = self.prefix / name
        subprocess.run([COMPILER, "-x", "c++", "-", "-o", path, *options], input="int main() {}", text=True, check=True)
        return path

    def relocate(self, torch, runpath):
        """RUNPATHs of a program and the library, or what went wrong."""
        files = [self.build("bin/tessera", f"-Wl,-rpath,{runpath}"),
                 self.build("lib64/libtessera.so.0.1.0", "-shared", "-fPIC", f"-Wl,-rpath,{runpath}")]
        result = subprocess.run(["cmake", f"-DPREFIX={self.prefix}", f"-DTORCH={torch}", "-P", PACKAGING / "relocate.cmake"],
                                capture_output=True, text=True)
        if result.returncode != 0:
            return result.stderr
        return [text for file in files for tag, text in dynamic_entries(file) if tag == DT_RUNPATH]

    def test_a_torch_beside_the_tree_moves_with_it(self):
        self.assertEqual(self.relocate("../torch", "$ORIGIN:$ORIGIN/../lib64:/home/somebody/torch/lib"),
                         ["$ORIGIN/../lib64:$ORIGIN/../../torch/lib", "$ORIGIN/../../torch/lib"])
        self.assertIn('set(TESSERA_TORCH_OF_BUILD "${PACKAGE_PREFIX_DIR}/../torch")', self.config.read_text())

    def test_a_torch_in_a_folder(self):
        self.assertEqual(self.relocate("/opt/libtorch", "$ORIGIN:$ORIGIN/../lib64:/home/somebody/torch/lib"),
                         ["$ORIGIN/../lib64:/opt/libtorch/lib", "/opt/libtorch/lib"])
        self.assertIn('set(TESSERA_TORCH_OF_BUILD "/opt/libtorch")', self.config.read_text())

    def test_a_path_without_room_is_refused(self):
        told = " ".join(self.relocate("../torch", "$ORIGIN:$ORIGIN/../lib64:/t/lib").split())
        self.assertIn("expected room for the RUNPATH $ORIGIN/../lib64:$ORIGIN/../../torch/lib, found only", told)


if __name__ == "__main__":
    unittest.main()
