"""scripts/train_flags.sh gives `make train` the frozen text, and the GPU where there is one, else what a CPU can do."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


class TrainFlags(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        shutil.copytree(SCRIPTS, self.folder / "scripts")
        self.bin = self.folder / "path"
        self.program("python3", "echo")  # knows no torch
        self.program("nvidia-smi", "exit 9")
        self.torch = self.folder / "torch"
        header = self.torch / "include/torch/headeronly/version.h"
        header.parent.mkdir(parents=True)
        parts = {"MAJOR": 2, "MINOR": 11, "PATCH": 0}
        header.write_text("".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in parts.items()))
        (self.torch / "lib").mkdir()

    def program(self, name, text):
        self.bin.mkdir(exist_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def make_gpus(self, count):
        (self.torch / "lib/libtorch_cuda.so").touch()
        self.program("nvidia-smi", "\n".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'" for i in range(count)) or "exit 9")

    def flags(self, *arguments, **environment):
        environment |= {"PATH": f"{self.bin}:/usr/bin:/bin", "TESSERA_TORCH": str(self.torch)}
        if "TESSERA_CPUINFO" not in environment:
            environment["TESSERA_CPUINFO"] = str(self.cpuinfo("sse2 avx2"))
        result = subprocess.run([self.folder / "scripts/train_flags.sh", *arguments], env=environment,
                                capture_output=True, text=True, check=True)
        words = result.stdout.split()
        self.assertEqual("cuda" in words, "a GPU is here" in result.stderr, result.stderr)
        return words

    def cpuinfo(self, flags):
        path = self.folder / "cpuinfo"
        path.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} xsave\n")
        return path

    def value(self, flag, words):
        return words[words.index(flag) + 1]

    def test_texts_and_models_of_ones_own(self):
        for flag in ("--data=mine", "--sft=talk.jsonl"):
            self.assertNotIn("--data", self.flags(flag))
            self.assertNotIn("--validation-data", self.flags(flag))
        self.assertNotIn("--validation-data", self.flags("--validation-data", "mine"))
        self.assertIn("--data", self.flags("--validation-data", "mine"))
        self.make_gpus(1)
        for flag in ("--from", "--preset", "--model"):
            for device in ("cpu", "cuda"):
                words = self.flags(flag, "x", *(["--device", "cpu"] if device == "cpu" else []))
                for left_out in ("--blocks", "--tokenizer", "--optimizer", "--model"):
                    self.assertNotIn(left_out, words)
                self.assertEqual("cuda" in words, device == "cuda")

    def test_the_cpu_without_a_gpu_or_without_cuda(self):
        small = self.flags()
        self.assertEqual(self.value("--optimizer", small), "muon")
        self.assertEqual(self.value("--data", small), "build/text/train")
        self.assertEqual(self.value("--minutes", small), "2")
        self.make_gpus(0)
        self.assertEqual(self.flags(), small)
        self.make_gpus(1)
        (self.torch / "lib/libtorch_cuda.so").unlink()
        self.assertEqual(self.flags(), small)

    def test_bf16_where_the_processor_has_instructions_for_it(self):
        self.assertEqual(self.value("--precision", self.flags()), "fp32")
        for flags in ("avx512f avx512_bf16 avx2", "amx_bf16"):
            words = self.flags(TESSERA_CPUINFO=str(self.cpuinfo(flags)))
            self.assertEqual(self.value("--precision", words), "bf16")
        self.assertEqual(self.value("--precision", self.flags(TESSERA_CPUINFO="/nowhere")), "fp32")

    def test_texts_of_ones_own(self):
        words = self.flags("--data", "texts")
        self.assertNotIn("--data", words)
        self.assertNotIn("--validation-data", words)

    def test_a_rank_for_each_gpu_that_divides_the_batch(self):
        for gpus, ranks in ((1, "1"), (2, "2"), (3, "2"), (8, "8")):
            self.make_gpus(gpus)
            flags = self.flags("--steps", "50")
            self.assertEqual(flags[flags.index("--ranks") + 1], ranks)
            self.assertEqual(self.value("--device", flags), "cuda")
            self.assertEqual(self.value("--vocabulary", flags), "50304")

    def test_only_visible_gpus(self):
        self.make_gpus(4)
        flags = self.flags(CUDA_VISIBLE_DEVICES="2")
        self.assertEqual(flags[flags.index("--ranks") + 1], "1")
        self.assertNotIn("cuda", self.flags(CUDA_VISIBLE_DEVICES=""))

    def test_arguments_that_decide_alone(self):
        self.make_gpus(1)
        for words in (["--resume"], ["--config", "a.toml"]):
            self.assertEqual(self.flags(*words), [])
        for words in (["--device", "cpu"], ["--device=cpu"]):
            self.assertNotIn("cuda", self.flags(*words))


if __name__ == "__main__":
    unittest.main()
