"""check_numbers finds what it looks for."""

import pathlib
import tempfile
import unittest
from unittest import mock

import check_numbers

CSV = 'job,mode,ms,peer_ms,bytes\ngpt,dp,275.3022,299.1625,153049160\nmlp,dp,0.0924,1.9990,\n"a, b",dp,1,2,3\n'
HEAD = "| what | ours | theirs | aim | from |\n|---|---|---|---|---|\n"
LINK = "[1 day](benchmarks/results/a.csv)"


class Numbers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / "benchmarks/results").mkdir(parents=True)
        (self.root / "benchmarks/results/a.csv").write_text(CSV)
        patch = mock.patch.object(check_numbers, "ROOT", self.root)
        patch.start()
        self.addCleanup(patch.stop)

    def errors(self, text):
        page = self.root / "page.md"
        page.write_text(text)
        return list(check_numbers.check(page))

    def test_numbers_of_the_file_are_right(self):
        for row in (
            f"| 12 blocks | 275.30 ms | 299 ms | 1.1 | {LINK}<!-- job=gpt; mode=dp; ms peer_ms --> |",
            f"| GPT | 153 MB | | | {LINK}<!-- job=gpt; bytes/1e6 --> |",
            f"| two rows | 275 ms | 0.09 ms `2` | | {LINK}<!-- job=gpt; ms --><!-- job=mlp; ms --> |",
            f"| commas | 1 | 2 | | {LINK}<!-- job=a, b; ms peer_ms --> |",
            "| not marked | 3 | 4 | | |",
        ):
            self.assertEqual(self.errors(HEAD + row + "\n"), [], row)

    def test_others_are_found(self):
        right = f"| GPT | 275 ms | | | {LINK}<!-- job=gpt; ms --> |\n"
        for row in (
            f"| GPT | 276 ms | | | {LINK}<!-- job=gpt; ms --> |",
            f"| GPT | 275 ms | 300 ms | | {LINK}<!-- job=gpt; ms --> |",
            f"| GPT | 275 ms | | | {LINK}<!-- mode=dp; ms --> |",
            f"| GPT | 275 ms | | | {LINK}<!-- kind=gpt; ms --> |",
            f"| GPT | 275 ms | | | {LINK}<!-- job=gpt; us --> |",
            f"| MLP | 0 MB | | | {LINK}<!-- job=mlp; bytes --> |",
            "| GPT | 275 ms | | | [x](benchmarks/results/b.csv)<!-- job=gpt; ms --> |",
            "| GPT | 275 ms | | | <!-- job=gpt; ms --> |",
            f"| GPT | 275 ms | | | {LINK} |",
        ):
            self.assertEqual(len(self.errors(HEAD + right + row + "\n")), 1, row)


if __name__ == "__main__":
    unittest.main()
