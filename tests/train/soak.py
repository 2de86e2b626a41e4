#!/usr/bin/env python3
"""Kills ranks and launchers of a training job at random moments; in the end every loss must be that of a run that nobody
disturbed.

    soak.py build/release/bin/tessera --kills 30 --minutes 20 [--seed N]
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SETTINGS = ["--blocks", "2", "--width", "64", "--heads", "2", "--context", "64", "--batch", "8", "--warmup", "10",
            "--save-every", "20", "--eval-every", "0", "--sample", "0", "--log-every", "1000"]
CALIBRATION_STEPS = 200
SHARE_OF_LAUNCHERS = 0.2  # of the kills


def losses(run):
    """By step, of steps that were done twice the later one."""
    found = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            parsed = json.loads(line)
        except json.JSONDecodeError:
            continue  # a kill in the middle of a line
        if "loss" in parsed:
            found[parsed["step"]] = parsed["loss"]
    return found


def ranks_of(launcher):
    ranks = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            pid, command, _, parent = entry.joinpath("stat").read_text().split()[:4] if entry.name.isdigit() else ("", "", "", "")
        except OSError:
            continue
        if parent == str(launcher) and "tessera-train" in command:
            ranks.append(int(pid))
    return ranks


def words(tool, run, steps, layout):
    return [tool, "train", "--run", str(run), "--data", str(run.parent / "text"), *SETTINGS, "--steps", str(steps), *layout]


def train(tool, run, steps, layout):
    subprocess.run(words(tool, run, steps, layout), check=True, stdout=subprocess.DEVNULL)
    return losses(run)


def start(tool, run, steps, layout, log):
    resume = ["--resume"] if list(run.glob("checkpoints/step-*")) else []
    if not resume:
        shutil.rmtree(run, ignore_errors=True)  # its launcher was killed before the first checkpoint
    environment = os.environ | {"TESSERA_RESTART_DELAY": "0"}  # kills come faster than it would let them
    return subprocess.Popen([*words(tool, run, steps, layout), "--max-restarts", "1000", *resume],
                            stdout=log, stderr=log, env=environment)


def kill_some(job, chooser):
    """Whether something was killed."""
    ranks = ranks_of(job.pid)
    if not ranks:
        return False
    if chooser.random() < SHARE_OF_LAUNCHERS:
        job.kill()
        job.wait()
        time.sleep(1)  # its ranks notice
        return True
    try:
        os.kill(chooser.choice(ranks), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def disturb(tool, run, steps, layout, kills, seconds, chooser, log):
    """Trains to the end, kills spread over about so many seconds; returns how many there were."""
    done = 0
    job = start(tool, run, steps, layout, log)
    def pause():
        return chooser.uniform(0, 1.5 * seconds / kills)  # on average early enough for all of them

    next_kill = time.monotonic() + pause()
    while True:
        if job.poll() is not None:
            if job.returncode == 0:
                return done
            job = start(tool, run, steps, layout, log)
        if done < kills and time.monotonic() >= next_kill:
            done += kill_some(job, chooser)
            next_kill = time.monotonic() + pause()
        time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("layout", nargs="*", help="further settings of the job, behind --")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chooser = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = pathlib.Path(folder)
        (home / "text").mkdir()
        (home / "text" / "numbers.txt").write_text("".join(f"{i} and {i * i}.\n" for i in range(20000)))
        begun = time.monotonic()
        train(options.tool, home / "first", CALIBRATION_STEPS, options.layout)
        step_seconds = (time.monotonic() - begun) / CALIBRATION_STEPS
        seconds = options.minutes * 60 * 0.4  # undisturbed once, disturbed once with what is lost
        steps = max(CALIBRATION_STEPS, int(seconds / step_seconds))
        expected = train(options.tool, home / "straight", steps, options.layout)
        with open(home / "log", "w") as log:
            kills = disturb(options.tool, home / "run", steps, options.layout, options.kills, seconds, chooser, log)
        found = losses(home / "run")
        differing = [step for step in expected if found.get(step) != expected[step]]
        print(f"{kills} kills, {steps} steps, {len(differing)} losses differ, "
              f"{(time.monotonic() - begun) / 60:.1f} minutes", flush=True)
        if differing or kills < options.kills:
            print((home / "log").read_text()[-4000:])
            print(f"first difference: step {differing[0] if differing else None}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
