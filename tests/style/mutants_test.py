"""The lists of tests/mutants fit the sources, and faults.py puts each fault behind a switch."""

import pathlib
import re
import sys
import tempfile
import unittest

from sources import ROOT

sys.path.insert(0, str(ROOT / "tests" / "mutants"))
from faults import ListError, mutated, read_lists  # noqa: E402

STRICT = {"comm", "replicate", "fully_shard", "dtensor", "compiler", "state"}


class Lists(unittest.TestCase):
    def test_every_place_is_there_once(self):
        lists = read_lists()
        self.assertGreaterEqual(sum(len(each.faults) for each in lists), 300)
        self.assertEqual({each.folder for each in lists if each.strict}, STRICT)
        for each in lists:
            for fault in each.faults:
                self.assertTrue(fault.source.startswith(f"src/{each.folder}/"), fault.where)

    def test_test_programs_are_there(self):
        text = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*/CMakeLists.txt"))
        known = set(re.findall(r"tessera_test\(NAME (\w+)", text))
        known |= {f"{name}_cpu" for name in known}
        for each in read_lists():
            self.assertEqual(set(each.programs) - known, set(), each.folder)


class Places(unittest.TestCase):
    SOURCE = "int f(int a) {\n  int b = a + 1;\n  g(b);\n  if (a < b) return b;\n  return a;\n}\n"

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "src").mkdir()
        (self.root / "src" / "f.cpp").write_text(self.SOURCE)

    def read(self, entries, head="tests: some\n"):
        (self.root / "some.txt").write_text(f"{head}\nsrc/f.cpp\n{entries}")
        return read_lists(self.root, self.root)[0].faults

    def switched(self, entries):
        return mutated("src/f.cpp", self.SOURCE, self.read(entries))

    def expect_error(self, words, entries, **more):
        with self.assertRaisesRegex(ListError, words):
            self.read(entries, **more)

    def test_expressions_and_statements_get_switches(self):
        text = self.switched("one: sum\n  int b = <[a + 1 ==> a]>;\ntwo: call\n  <[g(b); ==> ]>\n")
        self.assertIn("int b = (tessera_mutant(1) ? (a) : (a + 1));", text)
        self.assertIn("{ if (tessera_mutant(2)) {  } else { g(b); } }", text)

    def test_lines_keep_their_numbers_and_white_space_is_free(self):
        entries = "one: both\n  g(b);   if (<[a < b\n  ==> b < a]>)\n"
        self.assertEqual(self.switched(entries).count("\n"), self.SOURCE.count("\n") + 2)
        self.assertEqual(self.read(entries)[0].line, 4)

    def test_places_that_are_not_there_or_twice_are_errors(self):
        self.expect_error(r"some.txt:4: some.one: expected its place once in src/f.cpp, found it 0", "one: no\n  <[c ==> a]>\n")
        self.expect_error("found it 3 times", "one: no\n  <[int ==> long]>\n")
        self.expect_error("overlaps", "one: a\n  <[a + 1 ==> a]>\ntwo: b\n  int b = a + <[1 ==> 2]>;\n")

    def test_entries_that_say_nothing_are_errors(self):
        self.expect_error("something else", "one: same\n  <[a < b ==> a < b]>\n")
        self.expect_error("two statements or two expressions", "one: no\n  <[g(b); ==> b]>\n")
        self.expect_error("one <.old ==> new.>", "one: no\n  g(b);\n")
        self.expect_error("is there twice", "one: a\n  <[a + 1 ==> a]>\none: b\n  <[a < b ==> true]>\n")
        self.expect_error("expected a line `tests:", "one: a\n  <[a + 1 ==> a]>\n", head="strict: yes\n")


if __name__ == "__main__":
    unittest.main()
