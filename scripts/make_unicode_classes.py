#!/usr/bin/env python3
"""Writes tools/corpus/unicode_ranges.cpp: which characters are letters, numbers and white space.

The classes are asked of the package `tokenizers` itself, not of Python's unicodedata: a tokenizer of ours has to cut
words where that package's regular expressions do, and the Unicode versions of the two differ."""

import pathlib

import tokenizers

FILE = pathlib.Path(__file__).resolve().parents[1] / "tools/corpus/unicode_ranges.cpp"
CLASSES = {"Letter": r"\p{L}", "Number": r"\p{N}", "Space": r"\s"}
CHARACTERS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
FRAME = """#include "corpus/unicode_classes.h"

// Made by scripts/make_unicode_classes.py from the package tokenizers, version {version}.

namespace tessera::data {{

namespace {{

constexpr auto Letter = CharClass::Letter, Number = CharClass::Number, Space = CharClass::Space;

// clang-format off
constexpr ClassRange kRanges[] = {{
{rows}
}};
constexpr ClassRange kDigitRanges[] = {{
{digits}
}};
// clang-format on

}}  // namespace

std::span<const ClassRange> class_ranges() {{ return kRanges; }}

std::span<const ClassRange> further_digit_ranges() {{ return kDigitRanges; }}

}}  // namespace tessera::data
"""


def members(regex):
    """The code points that match."""
    remove = tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "removed")
    rest = set()
    for start in range(0, len(CHARACTERS), 4096):
        for text, _ in remove.pre_tokenize_str("".join(CHARACTERS[start : start + 4096])):
            rest.update(text)
    return [ord(c) for c in CHARACTERS if c not in rest]


def further_digits(numbers):
    """What the package's Digits takes for digits though its patterns do not: it knows a later Unicode."""
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    found = [ord(c) for c in CHARACTERS if [text for text, _ in digits.pre_tokenize_str("a" + c)][1:] == [c]]
    assert set(numbers) <= set(found), "numbers that are no digits"
    return sorted(set(found) - set(numbers))


def ranges(code_points):
    found = []
    for code_point in code_points:
        if found and found[-1][1] == code_point - 1:
            found[-1][1] = code_point
        else:
            found.append([code_point, code_point])
    return found


def lines(rows):
    cells = [f"{{0x{first:X}, 0x{last:X}, {name}}}," for first, last, name in rows]
    return "\n".join("  " + " ".join(cells[i : i + 4]) for i in range(0, len(cells), 4))


def main():
    found = {name: members(regex) for name, regex in CLASSES.items()}
    rows = sorted((first, last, name) for name, points in found.items() for first, last in ranges(points))
    digits = [(first, last, "Number") for first, last in ranges(further_digits(found["Number"]))]
    FILE.write_text(FRAME.format(version=tokenizers.__version__, rows=lines(rows), digits=lines(digits)))


if __name__ == "__main__":
    main()
