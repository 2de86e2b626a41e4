"""scripts/main_job_text.py unpacks the text of `make train`, of which whole groups of files are held out."""

import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/main_job_text.py"
spec = importlib.util.spec_from_file_location("main_job_text", SCRIPT)
main_job_text = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main_job_text)


class MainJobText(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name) / "deep/text"

    def unpacked(self):
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def test_unpacks_both_parts_once(self):
        main_job_text.unpack(self.folder)
        texts = self.unpacked()
        expected = {f"{part}/{path}": text for part, all in main_job_text.archived().items() for path, text in all.items()}
        del texts[".of"]
        self.assertEqual(texts, expected)
        mark = self.folder / "train/mark"
        mark.touch()
        main_job_text.unpack(self.folder)
        self.assertTrue(mark.exists(), "it was there already")

    def test_unpacks_anew_what_another_archive_left(self):
        self.folder.mkdir(parents=True)
        (self.folder / "old.txt").write_text("of another text")
        (self.folder / ".of").write_text("another checksum")
        main_job_text.unpack(self.folder)
        self.assertFalse((self.folder / "old.txt").exists())
        self.assertTrue((self.folder / "validation").is_dir())

    def test_unpacks_once_for_all_who_come_at_the_same_time(self):
        for before in (None, "another checksum"):
            with self.subTest(before=before):
                if before:
                    (self.folder / ".of").write_text(before)
                command = [sys.executable, SCRIPT, "unpack", self.folder]
                all = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(6)]
                for one in all:
                    output, _ = one.communicate(timeout=120)
                    self.assertEqual((one.returncode, output), (0, b""))
                texts = self.unpacked()
                self.assertEqual(len(texts), sum(map(len, main_job_text.archived().values())) + 1)
                self.assertEqual([path.name for path in self.folder.parent.iterdir() if path.is_dir()], ["text"])

    def test_holds_out_whole_groups(self):
        parts = main_job_text.archived()
        groups = {part: {main_job_text.group_of(pathlib.PurePosixPath(path)) for path in texts} for part, texts in parts.items()}
        self.assertEqual(groups["train"] & groups["validation"], set())
        for path in ("include/tessera/optim.h", "docs/guide/optim.md"):
            self.assertIn(path, parts["validation"])
        held_out, all = (sum(map(len, texts.values())) for texts in (parts["validation"], parts["train"] | parts["validation"]))
        self.assertTrue(0.03 < held_out / all < 0.1, held_out / all)

    def test_is_of_the_commit_it_names(self):
        git = ["git", "-C", SCRIPT.parent, "cat-file", "-e", main_job_text.COMMIT + "^{commit}"]
        if subprocess.run(git, capture_output=True, check=False).returncode != 0:
            self.skipTest("the commit is not in this clone")
        texts = {str(path): content for path, content in main_job_text.texts_at(main_job_text.COMMIT)}
        parts = main_job_text.archived()
        self.assertEqual(parts["train"] | parts["validation"], texts)
        self.assertLess(main_job_text.ARCHIVE.stat().st_size, 1_000_000)


if __name__ == "__main__":
    unittest.main()
