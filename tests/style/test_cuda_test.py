"""scripts/test_cuda.sh says in one line that there is no GPU and runs what needs one where there is; summarize_tests.py says
why tests were skipped. Devices, libtorch, cmake, MPS and the test binary are stand-ins, so the machine does not matter."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"

SKIPPED = "tests/support/device_cases.cpp:70\nno GPU: cuda_nccl_2 needs one\n"
# Of a rank that is a process.
SKIPPED_IN_RANK = "tests/comm/a_test.cpp:7: Skipped\nno backend nccl in this build of libtorch\n"


def attribute(text):
    return text.replace("\n", "&#x0A;")


def report(*cases):
    """A JUnit file as gtest writes it, of (name, what is in its <testcase>)."""
    inside = "".join(f'<testcase name="{name}" classname="RanksOnCuda" time="0.5">{text}</testcase>' for name, text in cases)
    return f'<?xml version="1.0" encoding="UTF-8"?><testsuites><testsuite name="RanksOnCuda">{inside}</testsuite></testsuites>'


def skipped(message):
    return f'<skipped message="{attribute(message)}"/>'


class InFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()


class TestCuda(InFolder):
    def setUp(self):
        super().setUp()
        shutil.copytree(SCRIPTS, self.folder / "scripts")
        self.program("path/python3", f'exec "{sys.executable}" "$@"')
        self.program("path/cmake", "")
        self.program("path/nvidia-cuda-mps-control", "exit 1")
        self.torch = self.folder / "torch"
        header = self.torch / "include/torch/headeronly/version.h"
        header.parent.mkdir(parents=True)
        parts = {"MAJOR": 2, "MINOR": 13, "PATCH": 0}
        header.write_text("".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in parts.items()))
        (self.torch / "lib").mkdir()

    def program(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def make_cuda_torch(self):
        (self.torch / "lib/libtorch_cuda.so").touch()

    def make_binary(self, result, status=0):
        """What cmake would have built: a binary that lists two tests and leaves `result` where it is told to."""
        (self.folder / "result.xml").write_text(result)
        self.program("build/cuda/bin/tests/comm", f"""
for argument; do
  case $argument in
    --gtest_list_tests) printf 'RanksOnCuda.\\n  Adds\\n  Multiplies\\n' && exit ;;
    --gtest_filter=*) echo "filter ${{argument#--gtest_filter=}}" ;;
    --gtest_output=xml:*) cp "{self.folder}/result.xml" "${{argument#--gtest_output=xml:}}" ;;
  esac
done
exit {status}""")
        (self.folder / "build/cuda/cuda_tests.txt").write_text("comm *OnCuda*\n")

    def run_script(self, *arguments, has_device=True):
        # The script looks for /dev/nvidia0 by bash's compgen; a function of that name comes first.
        environment = {"PATH": f"{self.folder / 'path'}:/usr/bin:/bin", "TESSERA_TORCH": str(self.torch), "JOBS": "1",
                       "BASH_FUNC_compgen%%": f"() {{ return {int(not has_device)}; }}"}
        return subprocess.run([self.folder / "scripts/test_cuda.sh", *arguments], env=environment, capture_output=True,
                              text=True, check=False, timeout=50)

    def expect_no_gpu(self, why, **options):
        for arguments, code in (((), 0), (("--filter", "."), 0), (("--has-gpu",), 3)):
            result = self.run_script(*arguments, **options)
            self.assertEqual((result.returncode, result.stderr), (code, ""), arguments)
            self.assertEqual(result.stdout, f"no GPU here: {why}; GPU tests skipped\n")
        self.assertFalse((self.folder / "build").exists())

    @unittest.skipIf(os.path.exists("/dev/dxg"), "the GPU of this Windows host can't be hidden")
    def test_a_machine_without_a_gpu_gets_one_line(self):
        self.make_cuda_torch()
        self.expect_no_gpu("no NVIDIA device", has_device=False)

    def test_so_does_one_without_a_cuda_build_of_libtorch(self):
        self.expect_no_gpu(f"{self.torch} is no CUDA build of libtorch")

    def test_has_gpu_says_nothing_where_there_is_one(self):
        self.make_cuda_torch()
        result = self.run_script("--has-gpu")
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))
        self.assertFalse((self.folder / "build").exists())

    def test_runs_the_tests_and_says_why_some_were_skipped(self):
        self.make_cuda_torch()
        self.make_binary(report(("Adds", ""), ("Multiplies", skipped(SKIPPED))))
        result = self.run_script()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("MPS does not start here: without it\n", result.stdout)
        self.assertIn("skipped 1: no GPU: cuda_nccl_2 needs one\n", result.stdout)
        self.assertIn("\n1 passed, 0 failed, 1 skipped in ", result.stdout)
        log = self.folder / "build/cuda/test-cuda/comm.1.log"
        self.assertEqual(sorted(log.read_text().split()[1].split(":")), ["RanksOnCuda.Adds", "RanksOnCuda.Multiplies"])

    def test_a_filter_picks_tests(self):
        self.make_cuda_torch()
        self.make_binary(report(("Adds", "")))
        self.assertEqual(self.run_script("--no-mps", "--filter", "^comm\\..*Adds").returncode, 0)
        self.assertEqual((self.folder / "build/cuda/test-cuda/comm.1.log").read_text(), "filter RanksOnCuda.Adds\n")
        result = self.run_script("--no-mps", "--filter", "Divides")
        self.assertEqual(result.returncode, 1)
        self.assertIn("expected tests to run, found none: the filter matches none\n", result.stdout)

    def test_fails_where_a_test_does(self):
        self.make_cuda_torch()
        self.make_binary(report(("Adds", '<failure message="2"/>')), status=1)
        result = self.run_script("--no-mps")
        self.assertEqual(result.returncode, 1)
        self.assertIn("failed: comm.RanksOnCuda.Adds (build/cuda/test-cuda/comm.1.log)\n", result.stdout)

    def test_refuses_other_options(self):
        result = self.run_script("--all")
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertIn("got '--all'", result.stderr)


class Summary(InFolder):
    def add(self, name, text, status=0):
        (self.folder / f"{name}.status").write_text(f"{status}\n")
        if text is not None:
            (self.folder / f"{name}.xml").write_text(text)

    def summary(self):
        return subprocess.run([sys.executable, SCRIPTS / "summarize_tests.py", self.folder, "--seconds", "7"],
                              capture_output=True, text=True, check=False)

    def test_reasons_of_skipped_tests_are_counted(self):
        self.add("comm.1", report(("Adds", skipped(SKIPPED)), ("Multiplies", skipped(SKIPPED_IN_RANK)), ("Ends", "")))
        self.add("replicate.4ranks.1", report(("Trains", skipped(SKIPPED)), ("Stops", "<skipped/>")))
        result = self.summary()
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        lines = result.stdout.splitlines()
        self.assertEqual(lines[0], "skipped 2: no GPU: cuda_nccl_2 needs one")
        self.assertEqual(lines[1:3], ["skipped 1: no backend nccl in this build of libtorch", "skipped 1: no reason given"])
        self.assertEqual(lines[-1], "1 passed, 0 failed, 4 skipped in 7 s")

    def test_a_run_that_ends_before_its_results_or_after_them_fails(self):
        self.add("comm.1", None, status=139)
        self.add("comm.2", report(("Adds", "")), status=1)
        result = self.summary()
        self.assertEqual(result.returncode, 1)
        self.assertIn("comm.1 ended with exit code 139 before it wrote its results", result.stdout)
        self.assertIn("comm.2 ended with exit code 1 though its tests passed", result.stdout)

    def test_no_test_at_all_is_a_failure(self):
        self.assertEqual(self.summary().returncode, 1)

    def summary_of_ctest(self, *tests):
        """Of (name, what is in its <testcase>) in ctest's file."""
        cases = "".join(f'<testcase name="{name}" time="1">{text}</testcase>' for name, text in tests)
        self.junit = self.folder / "ctest.xml"
        self.junit.write_text(f"<testsuite>{cases}</testsuite>")
        return subprocess.run([sys.executable, SCRIPTS / "summarize_tests.py", self.folder, "--ctest", self.junit],
                              capture_output=True, text=True, check=False)

    def test_tests_of_ctest_are_replaced_by_the_cases_of_their_binaries(self):
        (self.folder / "comm.fast.xml").write_text(report(("Adds", ""), ("Multiplies", skipped(SKIPPED))))
        script = "<skipped message='x'/><system-out>skipped: no browser\n</system-out>"
        alone = "<skipped/><system-out>f.cpp:3: Skipped\nno GPU\n\n[  SKIPPED ] A.B (0 ms)</system-out>"
        result = self.summary_of_ctest(("comm.fast", ""), ("style.page", script), ("comm.A.B", alone), ("nn.bench", ""))
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("skipped 1: no browser\n", result.stdout)
        self.assertIn("skipped 1: no GPU\n", result.stdout)
        self.assertEqual(result.stdout.splitlines()[-1], "2 passed, 0 failed, 3 skipped")
        for text in ('name="comm.RanksOnCuda.Adds"', 'message="no browser"'):
            self.assertIn(text, self.junit.read_text())
        self.assertNotIn('name="comm.fast"', self.junit.read_text())

    def test_binaries_of_ctest_that_crash_fail(self):
        result = self.summary_of_ctest(("comm.dist", '<failure message="Segfault"/>'), ("nn.bench", ""))
        self.assertEqual(result.returncode, 1)
        self.assertIn("failed: comm.dist (", result.stdout)


if __name__ == "__main__":
    unittest.main()
