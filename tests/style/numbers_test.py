"""check_numbers finds what it looks for."""

import pathlib
import tempfile
import unittest
from unittest import mock

import check_numbers

CSV = 'job,mode,ms,peer_ms,bytes\ngpt,dp,275.3022,299.1625,153049160\nmlp,dp,0.0924,1.9990,\n"a, b",dp,1,2,3\n'
HEAD = "| what | ours | theirs | aim | from |\n|---|---|---|---|---|\n"
LINK = "[1 day](benchmarks/results/a.csv)"
TIMED = "job,mode,peer,ratio\ngpt,dp,ddp,1.50\ngpt,dp,ddp_malloc,1.40\nmlp,dp,ddp,2\n"
TIMED_BOUNDS = """\
gpt dp against ddp, medians over 7 pairs: ratio 1.605 (1.320 to 1.944 with 98.4 % confidence), vs_limit 1 (0 to 2 with 9 %)
gpt dp against ddp_malloc, medians over 7 pairs: ratio 1.4 (1.3 to 1.5 with 98.4 % confidence)
"""
COMM = "op,dtype,bytes,ranks,device,backend,vs_gloo\nsend,f,4096,2,cuda,shm,2.88\nsend,f,4096,2,cuda,gloo,1\n"
COMM_BOUNDS = "send of 4096 bytes of f on cuda, 2 ranks, shm against gloo, over 7: ratio 2.89 (2.55 to 3.509 with 98 %)\n"


class Numbers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / "benchmarks/results").mkdir(parents=True)
        for name, text in (("a.csv", CSV), ("timed.csv", TIMED), ("timed.bounds.txt", TIMED_BOUNDS), ("comm.csv", COMM),
                           ("comm.bounds.txt", COMM_BOUNDS)):
            (self.root / "benchmarks/results" / name).write_text(text)
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

    def test_intervals_are_those_of_the_bounds_beside_the_file(self):
        def wrong(cell, name, mark):
            return self.errors(HEAD + f"| x | {cell} | | | [1 day](benchmarks/results/{name})<!-- {mark} --> |\n")

        gpt = "job=gpt; mode=dp; peer=ddp; ratio low high"
        self.assertEqual(wrong("1.50 (1.32 to 1.94)", "timed.csv", gpt), [])
        self.assertEqual(wrong("2.88 (2.55 to 3.51)", "comm.csv", "backend=shm; vs_gloo low high"), [])
        self.assertEqual(len(wrong("1.50 (1.32 to 1.95)", "timed.csv", gpt)), 1)
        self.assertEqual(len(wrong("1.50", "timed.csv", gpt)), 1)
        self.assertEqual(len(wrong("2 (1 to 3)", "timed.csv", "job=mlp; ratio low high")), 1)


if __name__ == "__main__":
    unittest.main()
