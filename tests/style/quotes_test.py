"""check_quotes finds what it looks for."""

import pathlib
import tempfile
import unittest
from unittest import mock

import check_quotes

SOURCE = "int main() {\n  first();\n\n  second();\n}\n\nint other() {\n  first();\n  third();\n}\n"
MARK = "<!-- examples/a.cpp -->\n"
AFTER = "<!-- after: examples/a.cpp -->\n"


class Quotes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / "examples").mkdir()
        (self.root / "examples/a.cpp").write_text(SOURCE)
        patch = mock.patch.object(check_quotes, "ROOT", self.root)
        patch.start()
        self.addCleanup(patch.stop)

    def errors(self, text):
        (self.root / "page.md").write_text(text)
        return list(check_quotes.check(pathlib.Path("page.md")))

    def test_lines_of_the_file_are_right(self):
        for text in (
            MARK + "```cpp\n  first();\n\n  second();\n```\n",
            MARK + "```diff\n int other() {\n   first();\n@@\n-\n-  second();\n+  third();\n }\n```\n",
            AFTER + "```diff\n-  zeroth();\n   first();\n+  third();\n```\n",
            MARK + "```cpp\nint main() {\n  // ...\n  second();\n}\n```\n",
            MARK + "```cpp\nint main() {\n```\n\nand\n\n```\noutput\n```\n",
            "```cpp\na page that quotes nothing\n```\n",
        ):
            self.assertEqual(self.errors(text), [], text)

    def test_other_lines_are_found(self):
        for text in (
            MARK + "```cpp\n  first();\n  second();\n```\n",
            MARK + "```cpp\nfirst();\n```\n",
            MARK + "```cpp\nint main() {\n// ...\n  fourth();\n```\n",
            MARK + "```diff\n-  zeroth();\n   first();\n+  third();\n```\n",
            AFTER + "```diff\n   first();\n+  fourth();\n```\n",
            "<!-- examples/b.cpp -->\n```cpp\nint main() {\n```\n",
            MARK + "```cpp\nint main() {\n```\n\n```cpp\nnot marked\n```\n",
            MARK + "\n```\noutput\n```\n",
        ):
            self.assertEqual(len(self.errors(text)), 1, text)


if __name__ == "__main__":
    unittest.main()
