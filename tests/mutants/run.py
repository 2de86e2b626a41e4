#!/usr/bin/env python3
"""Seeded faults against the tests: `make test-mutants ARGS="--only REGEX"`. Builds a copy of the sources in which every fault
of tests/mutants/*.txt is behind a switch (faults.py), into build/mutants; runs the tests of each folder without a fault and
notes which test comes by which fault, and how long it takes; then, for each fault, runs tests that come by it until one fails.
Prints what survives, and fails if something does where nothing may (`strict: yes` in a list) or if a test fails without a
fault. No set-up: works with the libtorch that scripts/find_torch.sh finds; GPUs are not used."""

import argparse
import concurrent.futures
import csv
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from faults import LISTS, ROOT, ListError, read_lists, write_tree  # noqa: E402

FOLDER = ROOT / "build" / "mutants"
BINARIES = FOLDER / "build" / "bin" / "tests"
LIMIT = 20.0  # seconds for the tests of one fault
LONGEST_TEST = 4.0  # longer ones are not fast
ROUND = 3.0  # seconds of tests, as measured without a fault, that are started at once
EXCLUDED = "*OnCuda*:*Peer*"
MOST_TESTS = 4096  # of one process


@dataclass
class Test:
    program: str
    name: str
    seconds: float
    reached: frozenset

    def kind(self):
        """Without the parameters of a TEST_P, but for the words that one begins with: a body, a variant."""
        suite, test = self.name.split(".", 1)
        test, _, parameters = test.partition("/")
        return self.program, suite.split("/")[-1], test, re.match("[A-Za-z]*", parameters)[0]


@dataclass
class Outcome:
    fault: object
    how: str  # failed, crashed, timeout, survived, unreached
    by: str = ""
    seconds: float = 0.0
    tests: int = 0
    log: list = field(default_factory=list)

    def is_killed(self):
        return self.how in ("failed", "crashed", "timeout")


def excluded_tests():
    """tests.txt: test program -> gtest patterns of what is not run, with why in comments."""
    found = defaultdict(lambda: EXCLUDED)
    for line in (LISTS / "tests.cfg").read_text().splitlines():
        words = line.split("#")[0].split()
        if words:
            found[words[0]] = ":".join([EXCLUDED, *words[1:]])
    return found


def environment_of(run_folder, **more):
    """What a test program sees: folders of its own, no GPU, ranks that stay for its next test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    (run_folder / "tmp").mkdir(parents=True, exist_ok=True)
    run_folder.chmod(0o755)  # tests look at it as another user, too
    cache = run_folder / "cache"
    warm = FOLDER / "cache"
    if warm.is_dir() and not cache.exists():
        shutil.copytree(warm, cache)
    return {**kept, "TMPDIR": str(run_folder / "tmp"), "TESSERA_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": "",
            "TESSERA_REUSE_RANKS": "1", "OMP_NUM_THREADS": "1", "TESSERA_RUN_OF_MUTANT": str(run_folder), **more}


def end_all_of(run_folder):
    """Ends what a run has left behind, wherever it moved: each of its processes has the run's folder in its environment."""
    mark = f"TESSERA_RUN_OF_MUTANT={run_folder}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            pass


def run_program(program, patterns, run_folder, limit, **more):
    """Runs tests of one program until one fails; returns the exit status (None: out of time) and what it printed."""
    log = run_folder / "log"
    arguments = [str(BINARIES / program), f"--gtest_filter={patterns}", "--gtest_color=no"]
    arguments += more.pop("arguments", ["--gtest_fail_fast"])
    with log.open("wb") as out:
        process = subprocess.Popen(arguments, cwd=ROOT, env=environment_of(run_folder, **more), stdout=out, stderr=out,
                                   stdin=subprocess.DEVNULL, start_new_session=True,
                                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
        try:
            status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
            process.kill()
            process.wait()
    end_all_of(run_folder)
    return status, log.read_text(errors="replace")


def last_test(text):
    """The test that failed, or the one that ran at the end."""
    failed = re.search(r"^\[  FAILED  \] (\S+\.\S+)", text, re.M)
    started = re.findall(r"^\[ RUN      \] (\S+)", text, re.M)
    return (failed[1] if failed else started[-1] if started else "start").rstrip(",")


# --- the build

def build(lists, programs, jobs):
    """Writes the copy and builds the test programs from it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_tree(FOLDER / "tree", lists)
    torch = subprocess.run([ROOT / "scripts" / "find_torch.sh"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if not torch:
        sys.exit("test-mutants: expected a libtorch, found none; `make setup` installs one, or name one by TESSERA_TORCH")
    # By a path within the copy, as in any clone: what another one compiled is taken from ccache.
    torch = re.sub(rf"^{re.escape(str(ROOT))}/(?=\.venv)", f"{FOLDER}/tree/", torch)
    configure = ["cmake", "-S", FOLDER / "tree", "-B", FOLDER / "build", "-DCMAKE_BUILD_TYPE=Release", f"-DTESSERA_TORCH={torch}"]
    if not (FOLDER / "build" / "CMakeCache.txt").exists() and shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    subprocess.run(configure, stdout=subprocess.DEVNULL, check=True)
    subprocess.run(["cmake", "--build", FOLDER / "build", "--parallel", str(jobs), "--target", *programs], check=True)


# --- without a fault

def run_share(program, patterns, share, shares, count):
    """One share of a program's tests; returns its tests and the names of those that failed."""
    run_folder = pathlib.Path(tempfile.mkdtemp(prefix="m", dir=FOLDER / "runs"))
    map_file, names_file, results = run_folder / "reached", run_folder / "reached.names", run_folder / "results.json"
    with map_file.open("wb") as out:
        out.truncate(4 + MOST_TESTS * (count + 1))
    status, text = run_program(
        program, patterns, run_folder, 900.0, arguments=[f"--gtest_output=json:{results}"],
        GTEST_TOTAL_SHARDS=str(shares), GTEST_SHARD_INDEX=str(share), TESSERA_REACHED=str(map_file), TESSERA_RUNNING_TEST=str(map_file),
        TESSERA_TEST_SECONDS="300")
    names = names_file.read_text().split() if names_file.exists() else []
    if not results.exists():
        return [], [f"{program}: ended with {status} in {last_test(text)}: {' | '.join(text.splitlines()[-5:])}"]
    data = map_file.read_bytes()
    rows = [data[4 + index * (count + 1):4 + (index + 1) * (count + 1)] for index in range(len(names) + 1)]
    passed_by = [frozenset(number for number, byte in enumerate(row) if byte) for row in rows]
    # What runs before any test is part of all of them.
    reached = {name: passed_by[index] | passed_by[0] for index, name in enumerate(names, 1)}
    tests, failed = [], []
    for suite in json.loads(results.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            name = f"{suite['name']}.{test['name']}"
            if test.get("failures"):
                failed.append(f"{program}.{name}")
            elif test.get("result") == "COMPLETED":
                tests.append(Test(program, name, float(test["time"].rstrip("s")), reached.get(name, frozenset())))
    if (run_folder / "cache").is_dir():
        shutil.copytree(run_folder / "cache", FOLDER / "warmed" / run_folder.name)
    shutil.rmtree(run_folder, ignore_errors=True)
    return tests, failed


def run_without_fault(programs, count, at_once):
    """All tests of the programs once; returns those that are fast, and those that failed."""
    excluded = excluded_tests()
    tests, failed = [], []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        shares = max(1, min(at_once, 4))
        running = {pool.submit(run_share, program, f"*-{excluded[program]}", share, shares, count): program
                   for program in programs for share in range(shares)}
        for done in concurrent.futures.as_completed(running):
            some, bad = done.result()
            tests += some
            failed += bad
            print(f"without a fault: {running[done]}: {len(some)} tests passed, {len(bad)} failed", flush=True)
    for warmed in (FOLDER / "warmed").glob("*"):
        shutil.copytree(warmed, FOLDER / "cache", dirs_exist_ok=True)
    shutil.rmtree(FOLDER / "warmed", ignore_errors=True)
    return [test for test in tests if test.seconds <= LONGEST_TEST], failed


# --- with one

def order_for(fault, programs, tests):
    """The tests that come by the fault: those that its entry asks for; else of each kind one first, those that come by few
    faults and are quick before others."""
    reaching = [test for test in tests if fault.number in test.reached and test.program in programs]
    asked_for = re.compile(fault.first) if fault.first else None
    reaching.sort(key=lambda test: (bool(asked_for) and not asked_for.search(test.name),
                                    (test.seconds + 0.02) * (len(test.reached) + 10)))
    seen, keyed = defaultdict(int), []
    for place, test in enumerate(reaching):
        keyed.append((seen[test.kind()], place, test))
        seen[test.kind()] += 1
    return [test for *_, test in sorted(keyed, key=lambda each: each[:2])]


def rounds_of(tests):
    """Groups of about ROUND seconds."""
    group, seconds = [], 0.0
    for test in tests:
        if group and seconds + test.seconds > ROUND:
            yield group, seconds
            group, seconds = [], 0.0
        group.append(test)
        seconds += test.seconds
    if group:
        yield group, seconds


def try_fault(fault, programs, tests):
    """Runs tests with the fault on until one fails or the time is over."""
    begin = time.monotonic()
    order = order_for(fault, programs, tests)
    if not order:
        return Outcome(fault, "unreached")
    ran, log = 0, ""
    for group, _ in rounds_of(order):
        by_program = defaultdict(list)
        for test in group:
            by_program[test.program].append(test)
        for program, some in by_program.items():
            expected = sum(test.seconds for test in some) * 2 + 3
            left = LIMIT - (time.monotonic() - begin)
            if expected > left:  # it could not be told from one that hangs
                return Outcome(fault, "survived", "", time.monotonic() - begin, ran)
            run_folder = pathlib.Path(tempfile.mkdtemp(prefix="m", dir=FOLDER / "runs"))
            try:
                status, log = run_program(program, ":".join(test.name for test in some), run_folder, left,
                                          TESSERA_MUTANT=str(fault.number))
            finally:
                shutil.rmtree(run_folder, ignore_errors=True)
            if status != 0:
                how = "timeout" if status is None else "failed" if re.search(r"^\[  FAILED  \]", log, re.M) else "crashed"
                (FOLDER / "logs" / f"{fault.full_name}.log").write_text(log)
                return Outcome(fault, how, f"{program}.{last_test(log)}", time.monotonic() - begin, ran + 1)
            ran += len(some)
    return Outcome(fault, "survived", "", time.monotonic() - begin, ran)


def tell(outcome, done, count):
    fault = outcome.fault
    what = {"survived": f"SURVIVED {outcome.tests} tests", "unreached": "SURVIVED: no fast test comes by it",
            "failed": f"failed {outcome.by}", "crashed": f"crashed {outcome.by}",
            "timeout": f"out of time in {outcome.by}"}[outcome.how]
    print(f"[{done}/{count}] {fault.full_name}: {what} ({outcome.seconds:.1f} s)", flush=True)


def try_all(lists, faults, tests, at_once):
    programs_of = {each.folder: each.programs for each in lists}
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(try_fault, fault, programs_of[fault.folder], tests) for fault in faults]
        for done in concurrent.futures.as_completed(running):
            outcomes.append(done.result())
            tell(outcomes[-1], len(outcomes), len(faults))
    return sorted(outcomes, key=lambda outcome: outcome.fault.number)


def check_killers(outcomes, tests, at_once):
    """Tests that noticed faults, once more without one: those that fail now have noticed nothing."""
    by_name = {f"{test.program}.{test.name}": test for test in tests}
    killers = {outcome.by for outcome in outcomes if outcome.is_killed() and outcome.by in by_name}

    def passes(name):
        test = by_name[name]
        run_folder = pathlib.Path(tempfile.mkdtemp(prefix="m", dir=FOLDER / "runs"))
        status, _ = run_program(test.program, test.name, run_folder, LIMIT * 3)
        shutil.rmtree(run_folder, ignore_errors=True)
        return name, status == 0

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        unsteady = {name for name, passed in pool.map(passes, sorted(killers)) if not passed}
    for outcome in outcomes:
        if outcome.by in unsteady:
            outcome.how = "survived"
    return unsteady


# --- the report

def report(lists, outcomes, failed, unsteady):
    """Prints the table and what survives, writes results.csv; returns the exit status."""
    with (FOLDER / "results.csv").open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["fault", "source", "line", "what", "outcome", "by", "seconds"])
        for each in outcomes:
            writer.writerow([each.fault.full_name, each.fault.source, each.fault.line, each.fault.what, each.how, each.by,
                             f"{each.seconds:.1f}"])
    print(f"\n{'folder':<14}{'faults':>8}{'failed':>8}{'crashed':>9}{'timeout':>9}{'survived':>10}")
    rows = [(each.folder + (" *" if each.strict else ""), [one for one in outcomes if one.fault.folder == each.folder])
            for each in lists] + [("all", outcomes)]
    for name, some in rows:
        if some:
            counts = [sum(one.how == how for one in some) for how in ("failed", "crashed", "timeout")]
            print(f"{name:<14}{len(some):>8}{counts[0]:>8}{counts[1]:>9}{counts[2]:>9}{len(some) - sum(counts):>10}")
    print("* none may survive")
    for each in outcomes:
        if not each.is_killed():
            fault = each.fault
            how = "no fast test comes by it" if each.how == "unreached" else f"{each.tests} tests passed"
            print(f"\nsurvives: {fault.full_name}: {fault.what} ({how})\n  {fault.source}:{fault.line}")
            print("\n".join(f"  - {line.strip()}" for line in fault.old.splitlines()))
            print("\n".join(f"  + {line.strip()}" for line in fault.new.splitlines()) or "  +")
    for name in failed:
        print(f"failed without a fault, so not used: {name}")
    for name in sorted(unsteady):
        print(f"failed with a fault, then without one, so what it noticed does not count: {name}")
    strict = {each.folder for each in lists if each.strict}
    lost = [each for each in outcomes if not each.is_killed() and each.fault.folder in strict]
    print(f"\n{len(outcomes)} faults, {sum(each.is_killed() for each in outcomes)} noticed; "
          f"{len(lost)} survive where none may; {len(failed)} tests failed without a fault")
    return 1 if lost or failed or unsteady else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="faults whose <folder>.<name> matches")
    parser.add_argument("--list", action="store_true", help="prints them, builds nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once; half as many tests")
    parser.add_argument("--no-build", action="store_true", help="with what is built already")
    parser.add_argument("--build-only", action="store_true", help="builds, runs nothing")
    options = parser.parse_args()
    try:
        lists = read_lists()
    except ListError as error:
        sys.exit(str(error))
    faults = [fault for each in lists for fault in each.faults if re.search(options.only, fault.full_name)]
    if not faults:
        sys.exit(f"test-mutants: no fault's name matches '{options.only}'")
    if options.list:
        for fault in faults:
            print(f"{fault.number} {fault.full_name}  {fault.source}:{fault.line}  {fault.what}")
        print(f"{len(faults)} faults")
        return 0
    folders = {fault.folder for fault in faults}
    programs = sorted({program for each in lists if each.folder in folders for program in each.programs})
    if not options.no_build:
        build(lists, programs, options.jobs)
    if options.build_only:
        return 0
    for name in ("runs", "logs", "cache", "warmed"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    for name in ("runs", "logs"):
        (FOLDER / name).mkdir()
    at_once = max(1, options.jobs // 2)  # a test has two ranks or more
    count = max(fault.number for each in lists for fault in each.faults)
    tests, failed = run_without_fault(programs, count, at_once)
    print(f"{len(tests)} tests of at most {LONGEST_TEST:g} s", flush=True)
    outcomes = try_all(lists, faults, tests, at_once)
    unsteady = check_killers(outcomes, tests, at_once)
    return report(lists, outcomes, failed, unsteady)


if __name__ == "__main__":
    sys.exit(main())
