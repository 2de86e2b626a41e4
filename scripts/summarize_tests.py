#!/usr/bin/env python3
"""Sums up the runs of test binaries in a folder: <name>.xml as gtest writes it, with either <name>.status (exit code) and
<name>.log, or, with --ctest FILE, a test of ctest by that name in the JUnit file. Of tests of ctest that have no report
in the folder ctest's own word counts; FILE gets the cases of the others in their place.

Prints how many tests passed, failed and were skipped, which failed, why tests were skipped, which took longest, and how
long each run took. Fails if a test or a run did, or if nothing was run.
"""

import argparse
import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

# What GTEST_SKIP() << reason leaves: "file:line\nreason"; in ranks that are processes also "file:line: Skipped\nreason".
PLACE = re.compile(r"^(\S+:\d+|unknown file)(: Skipped)?$")
# The same in the output of a process that ran one test; and what scripts print.
REASONS = (re.compile(r": Skipped\n(.*?)\n*\[  SKIPPED \]", re.DOTALL), re.compile(r"^skipped: (.*)$", re.MULTILINE))

SLOWEST = 10


def reason_of(message):
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line for line in lines if not PLACE.match(line)), "no reason given")


class Summary:
    def __init__(self):
        self.passed, self.failures, self.reasons, self.complaints = 0, [], collections.Counter(), []
        self.seconds, self.of_runs, self.empty = {}, collections.Counter(), []

    def add(self, run, name, case, where):
        """A <testcase> of the run."""
        self.seconds[name] = float(case.get("time") or 0)
        self.of_runs[run] += self.seconds[name]
        if case.find("failure") is not None:
            self.failures.append(f"{name} ({where})")
        elif (skipped := case.find("skipped")) is not None:
            self.reasons[reason_of(skipped.get("message") or skipped.text or "")] += 1
        else:
            self.passed += 1

    def add_report(self, run, report, code, where):
        """What gtest wrote, if it got so far, and the exit code, or what else is known of the end."""
        failed_before = len(self.failures)
        cases = cases_of(report) if report.exists() else []
        for case in cases:
            name = f"{run.partition('.')[0]}.{case.get('classname')}.{case.get('name')}"
            case.set("name", name)
            self.add(run, name, case, where)
        if report.exists() and not cases:
            self.empty.append(run)
        if not report.exists():
            self.complaints.append(f"{run} ended with {code} before it wrote its results ({where})")
        elif code != "exit code 0" and len(self.failures) == failed_before:
            self.complaints.append(f"{run} ended with {code} though its tests passed ({where})")
        return cases

    def print(self, seconds):
        skips = sum(self.reasons.values())
        for reason, count in self.reasons.most_common():
            print(f"skipped {count}: {reason}")
        for name in sorted(self.seconds, key=self.seconds.get, reverse=True)[:SLOWEST]:
            print(f"slow: {self.seconds[name]:.1f} s {name}")
        if self.empty:
            print(f"no test has the labels of: {', '.join(self.empty)}")
        print("runs: " + ", ".join(f"{name} {took:.0f} s" for name, took in self.of_runs.most_common(40)))
        for failure in self.failures:
            print(f"failed: {failure}")
        for complaint in self.complaints:
            print(complaint)
        took = "" if seconds is None else f" in {seconds} s"
        print(f"{self.passed} passed, {len(self.failures)} failed, {skips} skipped{took}")
        if self.passed + len(self.failures) + skips == 0:
            print("expected tests to run, found none: the filter matches none")
            return 1
        return 1 if self.failures or self.complaints else 0


def cases_of(report):
    """Those that ran: not what a filter left out, nor what is disabled."""
    return [case for case in ElementTree.parse(report).iter("testcase") if case.get("status", "run") == "run"]


def add_runs(summary, folder):
    for status in sorted(folder.glob("*.status")):
        code = f"exit code {status.read_text().strip()}"
        summary.add_report(status.stem, status.with_suffix(".xml"), code, status.with_suffix(".log"))


def add_tests_of_ctest(summary, junit, folder):
    tree = ElementTree.parse(junit)
    suite = tree.getroot() if tree.getroot().tag == "testsuite" else tree.find("testsuite")
    for test in suite.findall("testcase"):
        name = test.get("name")
        report = folder / f"{name}.xml"
        failure, skipped = test.find("failure"), test.find("skipped")
        if report.exists():
            code = "exit code 0" if failure is None else failure.get("message") or "an error"
            cases = summary.add_report(name, report, code, junit)
            if failure is None:
                suite.remove(test)
            suite.extend(cases)
            continue
        if skipped is not None:
            output = test.findtext("system-out") or ""
            found = next((match for match in (regex.search(output) for regex in REASONS) if match), None)
            if found:
                skipped.set("message", " ".join(found.group(1).split()))
            elif test.get("status") == "notrun":
                summary.complaints.append(f"{name} was not run: {skipped.get('message')} ({junit})")
                continue
        summary.add(name.partition(".")[0], name, test, junit)
    tree.write(junit, encoding="UTF-8", xml_declaration=True)


def main(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=int, help="that the runs took")
    parser.add_argument("--ctest", type=pathlib.Path, metavar="FILE", help="JUnit file of ctest")
    arguments = parser.parse_args(words)
    summary = Summary()
    if arguments.ctest:
        add_tests_of_ctest(summary, arguments.ctest, arguments.folder)
    else:
        add_runs(summary, arguments.folder)
    return summary.print(arguments.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
