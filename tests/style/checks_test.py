"""The checks find what they look for."""

import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import check_includes
import check_sources

sys.path.insert(0, str(check_includes.ROOT / "scripts"))

TABLE = "base - -\ncomm comm.h base\nmesh mesh.h comm\ntools - public\n"
FILES = {
    "include/tessera/comm.h": "",
    "include/tessera/mesh.h": "#include <tessera/comm.h>\n",
    "include/tessera/comm/group.h": "#include <tessera/comm.h>\n",
    "src/base/environment.h": "",
    "src/comm/shm/ring.h": '#include "base/environment.h"\n#include <vector>\n',
    "src/mesh/mesh.cpp": '#include <tessera/mesh.h>\n#include "base/environment.h"\n',
    "tools/tessera/main.cpp": "#include <tessera/comm.h>\n",
}


class Checks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        for module in (check_includes, check_sources):
            patch = mock.patch.object(module, "ROOT", self.root)
            patch.start()
            self.addCleanup(patch.stop)
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)
        return pathlib.Path(name)

    def wrong_includes(self, path):
        return list(check_includes.check(path, *check_includes.read_table(TABLE)))

    def test_includes_down_the_table_are_right(self):
        for name in FILES:
            self.assertEqual(self.wrong_includes(pathlib.Path(name)), [])

    def test_programs_include_no_parts(self):
        self.write("include/tessera/comm/group.h", "")
        program = self.write("examples/a.cpp", "#include <tessera/comm.h>\n#include <tessera/comm/group.h>\n")
        (error,) = check_includes.check_parts(program)
        self.assertIn("examples/a.cpp: includes <tessera/comm/group.h>, a part", error)
        self.assertEqual(list(check_includes.check_parts(self.write("examples/b.cpp", "#include <tessera/comm.h>"))), [])

    def test_headers_without_modules_stay_light(self):
        self.write("include/tessera/nn/modules.h", "")
        self.write("include/tessera/nn.h", "#include <tessera/nn/modules.h>\n")
        self.assertEqual(list(check_includes.check_light()), [])
        self.write("include/tessera/comm/group.h", "#include <tessera/nn.h>\n")
        self.write("include/tessera/comm.h", "#include <tessera/comm/group.h>\n")
        errors = list(check_includes.check_light())
        self.assertEqual(len(errors), 2, "comm.h, and mesh.h through it")
        self.assertIn("include/tessera/comm.h: brings in <tessera/nn/modules.h>", errors[0])

    def test_wrong_includes_are_found(self):
        for name, text in {
            "src/comm/up.cpp": "#include <tessera/mesh.h>",
            "src/base/up.cpp": '#include "../comm/shm/ring.h"',
            "src/unknown/a.cpp": "",
            "include/tessera/comm.h": '#include "base/environment.h"',
            "include/tessera/unknown.h": "",
            "include/tessera/comm/up.h": "#include <tessera/mesh.h>",
            "include/tessera/unknown/a.h": "",
            "tools/tessera/private.cpp": '#include "comm/shm/ring.h"',
        }.items():
            self.assertEqual(len(self.wrong_includes(self.write(name, text))), 1, name)

    def test_long_files_odd_names_and_marks_are_found(self):
        for name, text in {
            "src/a.h": "\n" * 151,
            "src/a.cpp": "\n" * 601,
            "src/CamelCase.cpp": "",
            "src/b.cpp": "// TO" "DO: later",
        }.items():
            self.assertEqual([bad for bad, _ in check_sources.check(self.write(name, text))], [True], name)
        self.assertEqual([bad for bad, _ in check_sources.check(self.write("src/c.cpp", "\n" * 401))], [False])

    def test_refused_calls_are_found_where_they_are_refused(self):
        for name, text, count in (
            ("tests/a_test.cpp", "std::random_device{}();", 1),
            ("src/a.cpp", "double x = std::strtod(text, nullptr);", 1),
            ("src/b.cpp", "std::stoll(text); restored(x);", 0),
            ("benchmarks/a.cpp", "->check(CLI::PositiveNumber)", 1),
            ("tests/b_test.cpp", "std::stod(text)", 0),
        ):
            self.assertEqual(len(list(check_sources.check(self.write(name, text)))), count, name)

    def test_questions_for_the_version_are_found_outside_their_header(self):
        text = "#if TORCH_VERSION_MINOR < 13\n#endif\nstd::cout << TORCH_VERSION;\n"
        self.assertEqual(list(check_sources.check(self.write(check_sources.VERSIONS, text))), [])
        for name in ("src/comm/a.cpp", "include/tessera/a.h", "tests/comm/a_test.cpp", "tools/train/a.cpp"):
            (bad, what), = check_sources.check(self.write(name, text))
            self.assertTrue(bad)
            self.assertIn(f"{name}:1: #if TORCH_VERSION_MINOR < 13: give the difference a name in src/base/", what)


if __name__ == "__main__":
    unittest.main()
