#!/usr/bin/env python3
"""Checks that measured numbers in the documentation are those of the file they cite.

A row of a table says where its numbers come from: by a link to a file in benchmarks/results, and by comments that name,
separated by semicolons, what selects one row of that file and, last, columns:

    | what | Tessera | PyTorch | ratio | measured |
    | GPT | 275 ms | 299 ms | 1.09 | [date](benchmarks/results/a.csv)<!-- job=gpt; mode=dp; tessera_ms peer_ms ratio --> |

The numbers of the row, from its second cell on, are those columns in this order, rounded to the digits shown; `bytes/1e6`
divides. `low` and `high`, where the file has no such columns, are the interval of the ratio in the a.bounds.txt beside it.
Cells under the heading `aim`, code and links are not counted. A table in which one row is marked has all marked.
"""

import csv
import decimal
import re
import sys

from sources import ROOT, report

MARK = re.compile(r"<!-- (.*?) -->")
SOURCE = re.compile(r"\[[^]]*\]\(([^)]*benchmarks/results/[^)]*\.csv)\)")
LINK_OR_CODE = re.compile(r"\[[^]]*\]\([^)]*\)|`[^`]*`|<!--.*?-->")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")
UNCOUNTED = "aim"
# How lines of a.bounds.txt begin, by the columns of the row in a.csv that they are about.
SUBJECTS = (
    "{job} {mode} against {peer}, ",
    "{op} of {bytes} bytes of {dtype} on {device}, {ranks} ranks, {backend} against gloo, ",
)
INTERVAL = re.compile(r": ratio [\d.]+ \(([\d.]+) to ([\d.]+) with")


def pages():
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text):
    """Yields (heading, [(line number, line)]) of every table."""
    rows = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("|"):
            rows.append((number, line))
            continue
        if len(rows) > 2:
            yield cells(rows[0][1]), rows[2:]
        rows = []


def shown(heading, line):
    """The numbers that a reader sees in a row, without its first cell."""
    counted = [cell for name, cell in zip(heading[1:], cells(line)[1:]) if name != UNCOUNTED]
    return [number.replace(",", "") for cell in counted for number in NUMBER.findall(LINK_OR_CODE.sub("", cell))]


def add_bounds(table, path):
    """Gives rows the columns low and high if a line of the bounds beside the file is about them."""
    lines = path.read_text().splitlines() if path.is_file() else []
    for row in table:
        for subject in SUBJECTS:
            try:
                found = [line for line in lines if line.startswith(subject.format(**row))]
            except KeyError:  # of another benchmark
                continue
            interval = INTERVAL.search(found[0]) if len(found) == 1 else None
            if interval:
                row.setdefault("low", interval[1])
                row.setdefault("high", interval[2])


def selected(table, mark):
    """The values that a comment names in the rows of a file; an error as a ValueError."""
    *keys, columns = [part.strip() for part in mark.split(";")]
    wanted = dict(key.split("=", 1) for key in keys)
    missing = [name for name in wanted if name not in table[0]]
    found = [row for row in table if all(row.get(name) == value for name, value in wanted.items())]
    if missing or len(found) != 1:
        raise ValueError(f"'{mark}' selects {len(found)} rows" + (f"; no column {missing[0]}" if missing else ""))
    for column in columns.split():
        name, _, divisor = column.partition("/")
        if not found[0].get(name):
            raise ValueError(f"'{mark}': there is no {name} in that row")
        yield decimal.Decimal(found[0][name]) / decimal.Decimal(divisor or 1)


def differs(text, value):
    digits = decimal.Decimal(1).scaleb(-len(text.partition(".")[2]))
    return value.quantize(digits, decimal.ROUND_HALF_UP) != decimal.Decimal(text)


def check_row(page, heading, line):
    source = SOURCE.search(line)
    path = source and (page.parent / source[1]).resolve()
    if path is None or not path.is_file():
        return f"expected a link to a file in benchmarks/results, got {source[1] if source else 'none'}"
    with open(path, newline="") as file:
        table = list(csv.DictReader(file))
    add_bounds(table, path.with_suffix(".bounds.txt"))
    try:
        values = [value for mark in MARK.findall(line) for value in selected(table, mark)]
    except ValueError as error:
        return f"{path.name}: {error}"
    numbers = shown(heading, line)
    if len(numbers) != len(values):
        return f"shows {len(numbers)} numbers ({' '.join(numbers)}), but names {len(values)} columns"
    wrong = [f"{text} is {value:f}" for text, value in zip(numbers, values) if differs(text, value)]
    return f"in {path.name}, {', '.join(wrong)}" if wrong else None


def check(page):
    for heading, rows in tables(page.read_text()):
        if not any(MARK.search(line) for _, line in rows):
            continue
        for number, line in rows:
            wrong = check_row(page, heading, line) if MARK.search(line) else "expected a comment that names its columns"
            if wrong:
                yield f"{page.relative_to(ROOT)}:{number}: {wrong}"


def main():
    return report(what for page in pages() for what in check(page))


if __name__ == "__main__":
    sys.exit(main())
