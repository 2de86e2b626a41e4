"""check_workflows finds what it looks for."""

import json
import pathlib
import tempfile
import unittest

import check_workflows


class Workflows(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / ".github/workflows").mkdir(parents=True)
        (self.root / "Makefile").write_text("JOBS ?= 1\ntest: setup  ## all\n\t@echo\ntest-asan:\n")

    def errors(self, steps):
        """Of a workflow; JSON is YAML, and Python reads it by itself."""
        text = json.dumps({"jobs": {"check": {"steps": steps}}} if steps else {})
        (self.root / ".github/workflows/ci.yml").write_text(text)
        return list(check_workflows.check(self.root, json.loads))

    def test_targets_of_the_makefile_are_right(self):
        self.assertEqual(self.errors([{"run": "make test"}, {"run": "make -s test-asan TESSERA_TEST_SEED=1\necho"}]), [])

    def test_other_targets_are_found(self):
        self.assertEqual(len(self.errors([{"run": "make test test-clang"}])), 1)
        self.assertEqual(len(self.errors([{"command": "make JOBS"}])), 1)

    def test_workflows_without_jobs_or_targets_are_found(self):
        self.assertEqual(len(self.errors([])), 1)
        self.assertEqual(len(self.errors([{"run": "echo"}])), 1)

    def test_what_is_no_yaml_is_found(self):
        (self.root / ".github/workflows/ci.yml").write_text("jobs: [")
        self.assertEqual(len(list(check_workflows.check(self.root, json.loads))), 1)


if __name__ == "__main__":
    unittest.main()
