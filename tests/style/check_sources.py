#!/usr/bin/env python3
"""Checks sizes (a .cpp at most 600 lines, better 400; a header 150), snake_case file names, forgotten marks, calls that
are refused for what they do, that one header alone asks for libtorch's version, that instructions of x86 are guarded, in few
files, and that the words are the field's."""

import re
import sys

from sources import ROOT, cpp_sources

MOST_LINES = {".h": 150, ".cpp": 600, ".cu": 600}
LONG = 400
MARKS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XXX)\b")

# (folders, what must not be there, what to do instead)
REFUSED = (
    (("tests",), re.compile(r"\brandom_device\b"), "draw from test_seed() of support/random.h, so that a run can be repeated"),
    (("src", "tools", "benchmarks"), re.compile(r"\b(strto(d|f|ld)|sto(d|f|ld)|atof)\s*\("),
     "read numbers exactly, by std::from_chars or parse_number() of tools/numbers.h"),
    (("tools", "benchmarks"), re.compile(r"\bCLI::(Range|PositiveNumber|NonNegativeNumber|Number)\b"),
     "use add_number() of tools/numbers.h: CLI11 rounds twice and does not tell the range"),
)

TORCH_VERSION = re.compile(r"\b(TORCH_VERSION_(MAJOR|MINOR|PATCH|ABI_TAG)|C10D_BACKEND_HAS_\w+)\b|#.*\bTORCH_VERSION\b")
VERSIONS = "src/base/torch_versions.h"

# The glossary of CONTRIBUTING.md: (what is not said, what is). Case tells names of ours from plain English.
GLOSSED = ("src", "include", "tools", "docs")
GLOSSARY = tuple((re.compile(rf"\b(?:{words})\b"), say) for words, say in (
    (r"[Rr]uns? as (?:it is|they are)", "runs eagerly, falls back to eager"),
    (r"TwoFaced\w*|two[ -]faced|two_faces", "sharded parameter"),
    (r"show_whole\w*|turn_whole", "unshard, unsharded"),
    (r"dismiss\w*", "reshard"),
    (r"Bystanders?|bystanders?", "unused parameter"),
    (r"Births|births_?|Fates|fates_?", "first definition, lifetime"),
    (r"Story|Stories", "event log"),
    (r"Wish(?:es)?|wish(?:es)?_?", "request"),
    (r"Speakers?|speakers?_?", "reporter"),
    (r"Together", "collective section"),
    (r"Passages?|turn_gradients_around", "backward boundary"),
    (r"Followers?", "the plain noun of what it does"),
    (r"lend|lends|lent|Lent\w*", "as_declared, borrowed, shared"),
    (r"Trials?|trial_", "state snapshot, dry run"),
    (r"[Mm]ailrooms?|mailbox(?:es)?", "point-to-point queue"),
    (r"[Ll]ookouts?", "watchdog"),
    (r"[Gg]raveyards?|buried", "blocks that wait to be freed"),
))

X86 = re.compile(r"\b(_mm\d*_\w+|_cvts[hs]_s[hs]|__builtin_ia32_\w+|__builtin_cpu_\w+|__m\d+i?|\w*mmintrin\.h)\b")
X86_GUARD = re.compile(r"^\s*#\s*(?:el)?if\b.*\b(__x86_64__|__SSE2__|__F16C__)\b")
# Each has a portable twin of what it does.
X86_FILES = {
    "src/base/memory.cpp",
    "src/comm/shm/channel.cpp",
    "src/comm/shm/half_types.h",
    "src/comm/shm/reduce_baseline.cpp",
    "src/compiler/kernels/thin_products.cpp",
    "src/optim/newton_schulz.cpp",
    "src/base/crc32c.cpp",
    "tests/comm/reduce_kernels_test.cpp",
}


def unguarded(lines):
    """Numbers of the lines with instructions of x86 that compile for other processors, too."""
    guards = []  # of each #if around the line: whether its present branch is for x86 alone
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*#\s*if", line):
            guards.append(bool(X86_GUARD.match(line)))
        elif re.match(r"\s*#\s*el", line) and guards:
            guards[-1] = bool(X86_GUARD.match(line))
        elif re.match(r"\s*#\s*endif", line) and guards:
            guards.pop()
        elif X86.search(line.split("//")[0]) and not any(guards):
            yield number


def glossed(lines):
    """(number of the line, the word, what to say instead) of each word that the glossary has replaced."""
    for number, line in enumerate(lines, 1):
        for pattern, say in GLOSSARY:
            for found in pattern.finditer(line):
                yield number, found[0], say


def check_words(path):
    for number, word, say in glossed((ROOT / path).read_text().splitlines()):
        yield True, f"{path}:{number}: '{word}': say {say}; see the glossary in CONTRIBUTING.md"


def pages():
    return sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))


def check(path):
    """Yields (is it an error, what)."""
    lines = (ROOT / path).read_text().splitlines()
    most = MOST_LINES[path.suffix]
    if len(lines) > most:
        yield True, f"{path}: {len(lines)} lines, at most {most}: split it by what it does"
    elif len(lines) > LONG:
        yield False, f"{path}: {len(lines)} lines, better at most {LONG}"
    if not re.fullmatch(r"[a-z0-9_]+", path.stem):
        yield True, f"{path}: expected a snake_case name"
    if any(X86.search(line.split("//")[0]) for line in lines) and str(path) not in X86_FILES:
        yield True, f"{path}: instructions of x86 belong into one of {', '.join(sorted(X86_FILES))}"
    for number in unguarded(lines):
        yield True, f"{path}:{number}: expected #if defined(__x86_64__) around it, and a portable twin behind #else"
    for number, line in enumerate(lines, 1):
        if MARKS.search(line):
            yield True, f"{path}:{number}: {line.strip()}: do it, or write an issue"
        if TORCH_VERSION.search(line) and str(path) != VERSIONS:
            yield True, f"{path}:{number}: {line.strip()}: give the difference a name in {VERSIONS}"
        for folders, pattern, remedy in REFUSED:
            if path.parts[0] in folders and pattern.search(line):
                yield True, f"{path}:{number}: {line.strip()}: {remedy}"


def main():
    found = [(bad, what) for path in cpp_sources() for bad, what in check(path)]
    words = [path for path in [*cpp_sources(), *pages()] if path.parts[0] in GLOSSED]
    found += [(bad, what) for path in words for bad, what in check_words(path)]
    for bad, what in found:
        print("error:" if bad else "warning:", what)
    return 1 if any(bad for bad, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main())
