#!/usr/bin/env python3
"""every_module.py ROOT INCLUDE_DIRECTORIES: each class of torch::nn is in tessera::nn, and in the table of its tests."""

import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
folders = [pathlib.Path(name) / "torch/nn/modules" for name in sys.argv[2].split(";")]
headers = [header for folder in folders for header in sorted(folder.rglob("*.h"))]
assert headers, f"no headers of torch::nn in {sys.argv[2]}"
declared = "".join(header.read_text() for header in headers)
include = root / "include/tessera"
ours = "".join(header.read_text() for part in ("nn", "detail/nn") for header in sorted((include / part).glob("*.h")))
tests = "".join(source.read_text() for source in sorted((root / "tests/nn").glob("*_test.cpp")))

names = {name for name in re.findall(r"^TORCH_MODULE\((\w+)\)", declared, re.MULTILINE)}
names |= set(re.findall(r"^class (\w+) : public torch::nn::ModuleHolder<\1Impl>", declared, re.MULTILINE))
assert len(names) > 100, sorted(names)
wrong = []
for name in sorted(names):
    if not re.search(rf"_\w+\({name}(?:, .*)?\);|^class {name} :|using torch::nn::{name};", ours, re.MULTILINE):
        wrong.append(f"tessera::nn lacks {name}")
    if not re.search(rf"MODULE_ROW\({name},|nn::{name}\b", tests):
        wrong.append(f"no test has {name}")
print(*wrong, f"{len(names)} classes, {len(wrong)} missing", sep="\n")
sys.exit(1 if wrong else 0)
