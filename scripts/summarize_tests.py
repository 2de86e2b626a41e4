#!/usr/bin/env python3
"""Sums up the runs of test binaries in a folder: <name>.xml as gtest writes it, <name>.status (exit code) and <name>.log.
Names are <binary> or <binary>.<part>, where several processes share a binary's tests.

Prints how many tests passed, failed and were skipped, which failed, why tests were skipped, which took longest, and how
long each run took. Fails if a test or a binary did, or if nothing was run.
"""

import argparse
import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

# What GTEST_SKIP() << reason leaves: "file:line\nreason"; in ranks that are processes also "file:line: Skipped\nreason".
PLACE = re.compile(r"^(\S+:\d+|unknown file)(: Skipped)?$")


SLOWEST = 10


def reason_of(message):
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line for line in lines if not PLACE.match(line)), "no reason given")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=int, default=0, help="that the runs took")
    arguments = parser.parse_args()

    passed, failures, reasons, complaints = 0, [], collections.Counter(), []
    seconds, of_runs = {}, collections.Counter()
    for status in sorted(arguments.folder.glob("*.status")):
        report, log = status.with_suffix(".xml"), status.with_suffix(".log")
        failed_before = len(failures)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else []
        for case in cases:
            name = f"{status.stem.partition('.')[0]}.{case.get('classname')}.{case.get('name')}"
            seconds[name] = float(case.get("time") or 0)
            of_runs[status.stem] += seconds[name]
            if case.find("failure") is not None:
                failures.append(f"{name} ({log})")
            elif (skipped := case.find("skipped")) is not None:
                reasons[reason_of(skipped.get("message") or skipped.text or "")] += 1
            else:
                passed += 1
        code = status.read_text().strip()
        if not report.exists():
            complaints.append(f"{status.stem} ended with exit code {code} before it wrote its results ({log})")
        elif code != "0" and len(failures) == failed_before:
            complaints.append(f"{status.stem} ended with exit code {code} though its tests passed ({log})")

    skips = sum(reasons.values())
    for reason, count in reasons.most_common():
        print(f"skipped {count}: {reason}")
    for name in sorted(seconds, key=seconds.get, reverse=True)[:SLOWEST]:
        print(f"slow: {seconds[name]:.1f} s {name}")
    print("runs: " + ", ".join(f"{name} {took:.0f} s" for name, took in of_runs.most_common()))
    for failure in failures:
        print(f"failed: {failure}")
    for complaint in complaints:
        print(complaint)
    print(f"{passed} passed, {len(failures)} failed, {skips} skipped in {arguments.seconds} s")
    if passed + len(failures) + skips == 0:
        print("expected tests to run, found none: the filter matches none")
        return 1
    return 1 if failures or complaints else 0


if __name__ == "__main__":
    sys.exit(main())
