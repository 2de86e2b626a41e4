"""scripts/find_torch.sh takes the right libtorch of several, and says why. Environments here are folders with a header, a
library's name and a `python` that knows where they lie."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/find_torch.sh"


class FindTorch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        (self.folder / "scripts").mkdir()
        shutil.copy(SCRIPT, self.folder / "scripts")
        self.bin = self.folder / "path"
        self.program(self.bin / "python3", "echo")  # knows no torch
        self.environment = {"PATH": f"{self.bin}:/usr/bin:/bin"}

    def program(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def torch(self, name, version="2.13.0", cuda=False):
        """The folder of a libtorch in `name`."""
        torch = self.folder / name / "torch"
        header = torch / "include/torch/headeronly/version.h"
        header.parent.mkdir(parents=True)
        parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
        header.write_text("".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in parts))
        (torch / "lib").mkdir()
        if cuda:
            (torch / "lib/libtorch_cuda.so").touch()
        return torch

    def make_environment(self, name, **options):
        torch = self.torch(name, **options)
        self.program(self.folder / name / "bin/python", f"echo {torch}")
        return torch

    def run_script(self, *arguments, **environment):
        return subprocess.run([self.folder / "scripts/find_torch.sh", *arguments], env={**self.environment, **environment},
                              capture_output=True, text=True, check=False)

    def expect(self, torch, why, **environment):
        result = self.run_script(**environment)
        self.assertEqual((result.returncode, result.stdout.strip()), (0, str(torch)), result.stderr)
        self.assertIn(why, result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)

    def expect_refused(self, *words, **environment):
        result = self.run_script(**environment)
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        for word in words:
            self.assertIn(word, result.stderr)

    def test_nothing_is_found_where_there_is_none(self):
        result = self.run_script()
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))

    def test_of_the_repositorys_environment(self):
        self.expect(self.make_environment(".venv"), "libtorch 2.13.0 without CUDA, of .venv: ")

    def test_of_an_active_environment(self):
        self.make_environment(".venv", cuda=True)
        torch = self.make_environment("active", version="2.12.1")
        for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            self.expect(torch, "libtorch 2.12.1 without CUDA, of the active environment",
                        **{variable: str(self.folder / "active")})

    def test_of_an_active_environment_for_cuda(self):
        self.make_environment(".venv", cuda=True)
        torch = self.make_environment("active", cuda=True)
        self.program(self.bin / "python3", f"echo {self.torch('system', cuda=True)}")
        for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            self.expect(torch, "libtorch 2.13.0 for CUDA, of the active environment",
                        **{variable: str(self.folder / "active")})

    def test_an_active_environment_without_torch_is_passed_over(self):
        own = self.make_environment(".venv")
        self.program(self.folder / "active/bin/python", "echo")
        self.expect(own, "of .venv", VIRTUAL_ENV=str(self.folder / "active"))

    def test_of_python3_if_it_is_for_cuda(self):
        self.make_environment(".venv")
        torch = self.torch("system", version="2.11.0", cuda=True)
        self.program(self.bin / "python3", f"echo {torch}")
        self.expect(torch, "libtorch 2.11.0 for CUDA, of python3, as it is a CUDA build: ")

    def test_of_python3_if_it_is_for_cuda_and_there_is_no_other(self):
        torch = self.torch("system", cuda=True)
        self.program(self.bin / "python3", f"echo {torch}")
        self.expect(torch, "libtorch 2.13.0 for CUDA, of python3, as it is a CUDA build: ")

    def test_not_of_python3_if_it_is_not(self):
        own = self.make_environment(".venv")
        self.program(self.bin / "python3", f"echo {self.torch('system')}")
        self.expect(own, "of .venv")

    def test_of_the_repositorys_environment_if_both_are_for_cuda(self):
        own = self.make_environment(".venv", cuda=True)
        self.program(self.bin / "python3", f"echo {self.torch('system', cuda=True)}")
        self.expect(own, "libtorch 2.13.0 for CUDA, of .venv: ")

    def test_an_old_one_of_python3_is_passed_over_with_a_word(self):
        self.program(self.bin / "python3", f"echo {self.torch('system', version='2.9.1', cuda=True)}")
        result = self.run_script()
        self.assertEqual((result.returncode, result.stdout), (0, ""))
        self.assertIn("libtorch 2.9.1 of python3 is passed over", result.stderr)

    def test_the_variable_comes_first(self):
        self.make_environment(".venv", cuda=True)
        self.make_environment("active")
        torch = self.torch("named")
        self.expect(torch, f"of TESSERA_TORCH={torch}", TESSERA_TORCH=str(torch), VIRTUAL_ENV=str(self.folder / "active"))

    def test_a_chosen_one_that_does_not_work_is_refused(self):
        self.make_environment("old", version="2.10.0")
        self.expect_refused("TESSERA_TORCH=/nowhere: expected a folder with include/ and lib/", TESSERA_TORCH="/nowhere")
        self.expect_refused("has torch 2.10.0, but Tessera works with 2.11 to 2.15", "deactivate it",
                            VIRTUAL_ENV=str(self.folder / "old"))

    def test_a_version_is_of_its_own_environment_alone(self):
        self.make_environment("active", cuda=True)
        self.make_environment(".venv", cuda=True)
        active = {"VIRTUAL_ENV": str(self.folder / "active")}
        result = self.run_script(TESSERA_TORCH_VERSION="2.14.1", **active)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))
        torch = self.make_environment(".venv-2.14.1", version="2.14.1", cuda=True)
        self.expect(torch, "libtorch 2.14.1 for CUDA, of TESSERA_TORCH_VERSION=2.14.1: ", TESSERA_TORCH_VERSION="2.14.1",
                    **active)

    def test_a_version_that_cannot_be_is_refused(self):
        for version in ("2.10.0", "2.16.0", "2.14", "3.11.0", "2.14.1+cpu", "../2.14.1"):
            self.expect_refused(f"TESSERA_TORCH_VERSION={version}: expected a version from 2.11 to 2.15", "as 2.13.0",
                                TESSERA_TORCH_VERSION=version)
        torch = self.torch("named")
        self.expect_refused("installs a libtorch of its own", f"TESSERA_TORCH={torch} names one", "set one of the two",
                            TESSERA_TORCH_VERSION="2.14.1", TESSERA_TORCH=str(torch))
        self.make_environment(".venv-2.15.0", version="2.15.1")
        self.expect_refused(".venv-2.15.0 has torch 2.15.1", "Remove the folder", TESSERA_TORCH_VERSION="2.15.0")

    def test_quiet_says_nothing(self):
        torch = self.make_environment(".venv")
        result = self.run_script("--quiet")
        self.assertEqual((result.stdout.strip(), result.stderr), (str(torch), ""))


if __name__ == "__main__":
    unittest.main()
