"""check_links finds what it looks for."""

import pathlib
import tempfile
import unittest
from unittest import mock

import check_links


class Links(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / "docs").mkdir()
        (self.root / "docs/other.md").write_text("# Other\n\n## 2. Ranks and `replicate`\n\n```\n# no heading\n```\n")
        patch = mock.patch.object(check_links, "ROOT", self.root)
        patch.start()
        self.addCleanup(patch.stop)

    def errors(self, text):
        page = self.root / "page.md"
        page.write_text(text)
        return list(check_links.check(page))

    def test_what_is_there_is_right(self):
        for text in (
            "[a](docs/other.md) and [b](docs)",
            "[a](docs/other.md#2-ranks-and-replicate)",
            "# Here\n\n[a](#here) [b](https://example.org/nothing)",
            "`[a](nowhere.md)`\n\n```\nf[i](x)\n```\n",
        ):
            self.assertEqual(self.errors(text), [], text)

    def test_what_is_not_is_found(self):
        for text in ("[a](other.md)", "[a](docs/other.md#no-heading)", "[a](#there)"):
            self.assertEqual(len(self.errors(text)), 1, text)


if __name__ == "__main__":
    unittest.main()
