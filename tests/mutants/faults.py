"""The seeded faults of this folder's lists, and the copy of the sources in which each is behind a switch.

A list, <folder of src>.txt, has lines `key: value` at its top (`tests`: its test programs; `strict: yes`: no fault may
survive), then for each source its path and its faults:

    src/comm/functional.cpp
    mean-is-a-sum: the mean of a functional all-reduce is not divided
      result.div_(<[group_size ==> 1]>);

`name [pattern]: what` names tests to begin with, for code that runs once, before any test. Indented text is a place that must occur once in the source (white space aside); what stands before `==>` becomes what stands
after it. Before it is an expression, or one statement, with its `;`, that declares nothing.
"""

import pathlib
import re
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
LISTS = ROOT / "tests" / "mutants"
HEADER = "tessera_mutant.h"

_MARK = re.compile(r"<\[(.*?)==>(.*?)\]>", re.S)
_ENTRY = re.compile(r"([a-z0-9][a-z0-9-]*)(?: \[(.+?)\])?: (\S.*)")
_STATEMENT = re.compile(r"(if|for|while|switch|do)\b")


class ListError(ValueError):
    """A list that says something that can't be: what, and where."""


@dataclass
class Fault:
    folder: str
    name: str
    what: str
    source: str  # path below the root
    where: str  # the list and its line
    first: str = ""  # a pattern of tests to begin with
    text: str = ""
    number: int = 0
    line: int = 0
    start: int = 0
    end: int = 0
    old: str = ""
    new: str = ""

    @property
    def full_name(self):
        return f"{self.folder}.{self.name}"

    def is_statement(self):
        return self.old.endswith(";") or bool(_STATEMENT.match(self.old))

    def switched(self):
        """What stands in the copy instead of `old`."""
        on = f"tessera_mutant({self.number})"
        if self.is_statement():
            return f"{{ if ({on}) {{ {self.new} }} else {{ {self.old} }} }}"
        return f"({on} ? ({self.new}) : ({self.old}))"


@dataclass
class FaultList:
    folder: str
    settings: dict = field(default_factory=dict)
    faults: list = field(default_factory=list)

    @property
    def programs(self):
        return self.settings["tests"].split()

    @property
    def strict(self):
        return self.settings.get("strict") == "yes"


def _pattern(text):
    """A regular expression for `text` with whatever white space."""
    return r"\s+".join(re.escape(word) for word in text.split())


def parse_list(path, text):
    """One list, its places not yet looked for."""
    found = FaultList(path.stem)
    source = None
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path.name}:{number}"
        if not line.strip() or line.startswith("#"):
            continue
        if line[0].isspace():
            if source is None or not found.faults:
                raise ListError(f"{where}: expected a source and `name: what it breaks` before a place")
            found.faults[-1].text += line + "\n"
            continue
        if line.startswith("src/"):
            source = line.strip()
            continue
        entry = _ENTRY.fullmatch(line.strip())
        if not entry:
            raise ListError(f"{where}: expected src/..., `name: what it breaks` or an indented place, got '{line}'")
        if source is None:
            if entry[1] not in ("tests", "strict"):
                raise ListError(f"{where}: expected `tests:` or `strict:` before the first source, got '{entry[1]}'")
            found.settings[entry[1]] = entry[3].strip()
            continue
        found.faults.append(Fault(path.stem, entry[1], entry[3], source, where, entry[2] or ""))
    if not found.settings.get("tests"):
        raise ListError(f"{path.name}: expected a line `tests: <test programs>` at its top")
    return found


def locate(fault, content):
    """Finds the place of `fault` in the text of its source."""
    marks = _MARK.findall(fault.text)
    if len(marks) != 1:
        raise ListError(f"{fault.where}: {fault.full_name}: expected one <[old ==> new]>, got {len(marks)}")
    fault.old, fault.new = (part.strip() for part in marks[0])
    if not fault.old or fault.old == fault.new:
        raise ListError(f"{fault.where}: {fault.full_name}: expected something to become something else")
    fits = fault.new[-1:] in ("", ";", "}") if fault.is_statement() else fault.new and not fault.new.endswith(";")
    if not fits:
        raise ListError(f"{fault.where}: {fault.full_name}: expected two statements or two expressions on the sides of ==>")
    before, after = _MARK.split(fault.text)[0], _MARK.split(fault.text)[-1]
    parts = [_pattern(before), f"(?P<old>{_pattern(fault.old)})", _pattern(after)]
    glue = [r"\s+" if before[-1:].isspace() else "", r"\s+" if after[:1].isspace() else ""]
    expression = parts[0] + (glue[0] if parts[0] else "") + parts[1] + (glue[1] if parts[2] else "") + parts[2]
    found = list(re.finditer(expression, content))
    if len(found) != 1:
        raise ListError(f"{fault.where}: {fault.full_name}: expected its place once in {fault.source}, found it "
                        f"{len(found)} times: {' '.join(fault.text.split())}")
    fault.start, fault.end = found[0].span("old")
    fault.old = content[fault.start:fault.end]
    fault.line = content.count("\n", 0, fault.start) + 1


def read_lists(folder=LISTS, root=ROOT):
    """All lists with their faults numbered and located; raises ListError with every problem in it."""
    lists, problems, names = [], [], set()
    number = 0
    for path in sorted(folder.glob("*.txt")):
        try:
            found = parse_list(path, path.read_text())
        except ListError as error:
            problems.append(str(error))
            continue
        lists.append(found)
        for fault in found.faults:
            number += 1
            fault.number = number
            if fault.full_name in names:
                problems.append(f"{fault.where}: {fault.full_name} is there twice")
            names.add(fault.full_name)
            try:
                locate(fault, (root / fault.source).read_text())
            except FileNotFoundError:
                problems.append(f"{fault.where}: {fault.full_name}: there is no {fault.source}")
            except ListError as error:
                problems.append(str(error))
    by_source = {}
    for fault in (fault for each in lists for fault in each.faults if fault.end):
        by_source.setdefault(fault.source, []).append(fault)
    for faults in by_source.values():
        faults.sort(key=lambda fault: fault.start)
        for first, second in zip(faults, faults[1:]):
            if second.start < first.end:
                problems.append(f"{second.where}: {second.full_name} overlaps {first.full_name} of {first.where}")
    if problems:
        raise ListError("\n".join(problems))
    return lists


def mutated(source, content, faults):
    """The text of a source with all its faults behind switches. Lines keep their numbers."""
    for fault in sorted((each for each in faults if each.source == source), key=lambda each: -each.start):
        content = content[:fault.start] + fault.switched() + content[fault.end:]
    return f'#include "{HEADER}"\n#line 1\n{content}'


def header(count):
    """The switch. A file that TESSERA_REACHED names is shared by a test program and its ranks: the number of its test that
    runs (tests/support/main.cpp counts), then for each test a byte for each fault, which becomes 1 where the test comes by."""
    return f"""#pragma once
#include <cstddef>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tessera_mutants {{
inline constexpr std::size_t kFaults = {count + 1};

struct Switches {{
  int on = 0;
  unsigned char* reached = nullptr;
  std::size_t tests = 0;
  Switches() {{
    if (const char* number = std::getenv("TESSERA_MUTANT")) on = std::atoi(number);
    const char* path = std::getenv("TESSERA_REACHED");
    const int file = path != nullptr ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    struct stat status;
    if (fstat(file, &status) == 0) {{
      void* mapped = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (mapped != MAP_FAILED) {{
        reached = static_cast<unsigned char*>(mapped);
        tests = (status.st_size - sizeof(unsigned)) / kFaults;
      }}
    }}
    close(file);
  }}
}};

__attribute__((noinline, cold)) inline void note(const Switches& switches, int number) {{
  const std::size_t test = __atomic_load_n(reinterpret_cast<unsigned*>(switches.reached), __ATOMIC_RELAXED);
  if (test < switches.tests) {{
    __atomic_store_n(switches.reached + sizeof(unsigned) + test * kFaults + number, 1, __ATOMIC_RELAXED);
  }}
}}
}}  // namespace tessera_mutants

inline bool tessera_mutant(int number) {{
  static const tessera_mutants::Switches switches;
  if (__builtin_expect(switches.reached != nullptr, 0)) tessera_mutants::note(switches, number);
  return switches.on == number;
}}
"""


def write_if_changed(path, data):
    """Keeps the time of a file that has these bytes already, so that nothing is compiled anew."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_tree(tree, lists):
    """A copy of the repository, without what was built, whose src has the faults behind switches."""
    faults = [fault for each in lists for fault in each.faults]
    sources = {fault.source for fault in faults}
    kept = {pathlib.Path("src") / HEADER}
    write_if_changed(tree / "src" / HEADER, header(len(faults)).encode())
    for path in sorted(ROOT.iterdir()):
        if path.name in (".git", "build", ".cache", "runs"):
            continue
        if path.name == ".deps" or path.name.startswith(".venv"):
            if not (tree / path.name).is_symlink():
                (tree / path.name).symlink_to(path.resolve())
            continue
        files = [path] if path.is_file() else [each for each in sorted(path.rglob("*")) if each.is_file()]
        for each in files:
            name = each.relative_to(ROOT)
            if "__pycache__" in name.parts:
                continue
            data = each.read_bytes()
            if str(name) in sources:
                data = mutated(str(name), data.decode(), faults).encode()
            write_if_changed(tree / name, data)
            (tree / name).chmod(each.stat().st_mode & 0o777)
            kept.add(name)
    for folder in sorted(tree.iterdir()):
        files = [] if folder.is_symlink() else [folder] if folder.is_file() else sorted(folder.rglob("*"))
        for each in files:
            if each.is_file() and "__pycache__" not in each.parts and each.relative_to(tree) not in kept:
                each.unlink()
