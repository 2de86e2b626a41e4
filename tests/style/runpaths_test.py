"""check_runpaths.py finds entries that mean the current folder."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

import check_runpaths

COMPILER = shutil.which("c++") or shutil.which("g++")


@unittest.skipUnless(COMPILER, "no C++ compiler")
class RunPaths(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def build(self, name, *options, text="int main() {}"):
        source = self.folder / "source.cpp"
        source.write_text(text)
        subprocess.run([COMPILER, str(source), "-o", str(self.folder / name), *options], check=True)
        return self.folder / name

    def test_absolute_folders_and_the_programs_own_are_right(self):
        for runpath in ("/usr/lib", "$ORIGIN:$ORIGIN/../lib:/opt/lib"):
            self.assertEqual(list(check_runpaths.check(self.build("right", f"-Wl,-rpath,{runpath}"))), [])

    def test_empty_and_relative_entries_are_found(self):
        for runpath in (":", "/opt/lib:::", ":/opt/lib", "lib", "$ORIGINAL"):
            for kind in ("--enable-new-dtags", "--disable-new-dtags"):
                program = self.build("wrong", f"-Wl,-rpath,{runpath},{kind}")
                found, = check_runpaths.check(program)
                self.assertIn(f"RUNPATH '{runpath}'", found)

    def test_a_program_that_loads_a_planted_library_is_found(self):
        program = self.build("tessera", "-Wl,-rpath,::::", "-Wl,--no-as-needed", text="#include <iostream>\nint main() {}")
        found = list(check_runpaths.problems([self.folder], COMPILER))
        self.assertEqual(len(found), 2, found)
        self.assertIn(f"{program.resolve()} --version loads libraries from the current folder", found[1])

    def test_nothing_to_read_is_no_success(self):
        self.assertEqual(len(list(check_runpaths.problems([self.folder], None))), 1)


if __name__ == "__main__":
    unittest.main()
