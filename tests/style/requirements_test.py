"""check_requirements finds what it looks for."""

import pathlib
import tempfile
import unittest

import check_requirements

PAGE = "# Requirements\n\n## R-000\n\nOur tests: [a](../tests/a/a_test.cpp).\n\n| id |\n|---|\n| R-000.1 | x |\n"


class Requirements(unittest.TestCase):
    def errors(self, page, test):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "tests/a").mkdir(parents=True)
            (root / "docs/requirements.md").write_text(page)
            (root / "tests/a/a_test.cpp").write_text(test)
            return list(check_requirements.check(root))

    def test_what_goes_together_is_right(self):
        self.assertEqual(self.errors(PAGE, "TEST(A, R_000_1_Trains) {}"), [])

    def test_what_does_not_is_found(self):
        self.assertEqual(len(self.errors(PAGE, "TEST(A, R_000_10_Trains) {}")), 2)
        self.assertEqual(len(self.errors(PAGE, "")), 1)
        self.assertEqual(len(self.errors(PAGE, "TEST(A, R_000_1_X) {} TEST(A, R_001_2_Y) {}")), 1)
