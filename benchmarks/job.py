#!/usr/bin/env python3
"""Measures `make train` on two ranks of a CPU against the same job in PyTorch (peers/train_gpt.py): the same text,
model and settings, those that scripts/train_flags.sh gives, both as a user starts them.

Losses come first: one run of --loss-steps on each side, compared step by step; how far PyTorch's own layouts are from
each other tells what noise is. Then --pairs rounds of short runs on all sides in turn, in the opposite order every
other time: tokens per second (the median of steps after the first few), and seconds from the start of the command to
the end of its first step. A round during which other programs took much of the processor is done again. At the end
--minutes of training on both sides: the nats per byte of text that neither has seen.
"""

import argparse
import csv
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = ROOT / "build/text"
OURS_ALONE = ("--save-every", "--eval-every", "--no-compile", "--prompt", "--minutes", "--data", "--validation-data", "--steps")
COLUMNS = ["row", "ranks", "tessera", "peer", "peer_value", "ratio", "low", "high"]
# Tells glibc to keep freed memory, as train_peers.cpp does.
KEEPING_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}
# ours: the peers in the same layout
MODES = {"replicate": ["ddp", "ddp_malloc"], "fully_shard": ["fsdp2", "fsdp2_malloc"]}
TOKENS_TARGETS = {"replicate": 1.1, "fully_shard": 1.4}
START_TARGET = 3.0  # seconds
POLL = 0.005
RUN_TIMEOUT = 900
QUIET = 0.05  # share of the cores that other programs may take
COMPARED_FIRST, LARGEST_FIRST = 10, 1e-3  # steps before noise has grown, and how far losses may differ in them


@dataclasses.dataclass
class Run:
    steps: list  # lines of metrics.jsonl that tell of a step
    first_step: float  # seconds since the command was given
    config: dict
    disturbance: float  # share of the cores that other programs took
    nats_per_byte: float  # None of a run without validation

    def losses(self):
        return [line["loss"] for line in self.steps]

    def tokens_per_s(self, skipped):
        tokens = self.steps[0]["tokens"]
        return statistics.median(tokens / line["step_seconds"] for line in self.steps[skipped:])


def busy_seconds():
    """Of all cores, whoever kept them busy, and of this program and what it has waited for."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts_and_stolen = (int(word) for word in file.readline().split()[1:9])
    used = (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK")
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return used, sum(usage.ru_utime + usage.ru_stime for usage in own)


class Bench:
    def __init__(self, options, folder):
        self.options = options
        self.folder = folder
        self.count = 0
        # A copy: somebody may edit the texts, and all sides have to read the same.
        self.texts = folder / "texts"
        self.data = []
        for number, path in enumerate(options.data):
            self.data.append(self.copied(path, str(number)))
        self.held_out = [self.copied(options.validation_data, "held-out")] if options.validation_data else []

    def copied(self, path, name):
        source = pathlib.Path(path).resolve()
        copy = self.texts / name / source.name
        copy.parent.mkdir(parents=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
        return str(copy.relative_to(self.texts))

    def command(self, side, run, steps, minutes):
        own = ["--data", *self.data, "--steps", str(steps), "--run", str(run)]
        if self.held_out and minutes > 0:
            own += ["--validation-data", *self.held_out]
        elif self.held_out:
            own += ["--validation", "0"]  # of a timed run nothing is asked but its steps
        own += ["--minutes", str(minutes), *self.options.recipe, *self.options.settings]
        if side in MODES:
            quiet = ["--save-every", "0", "--eval-every", "0", "--sample", "0", "--no-compile"]
            return [self.options.tool, "train", "--ranks", str(self.options.ranks), "--parallel", side, *own, *quiet]
        launcher = [self.options.python, "-m", "torch.distributed.run", "--standalone"]
        script = ["--nproc-per-node", str(self.options.ranks), "--", str(ROOT / "benchmarks/peers/train_gpt.py")]
        own += ["--final-validation"] if minutes > 0 else []
        return [*launcher, *script, "--parallel", side.removesuffix("_malloc"), *own]

    def run(self, side, steps, minutes=0.0):
        self.count += 1
        run = self.folder / f"{self.count}-{side}"
        log = self.folder / f"{self.count}-{side}.log"
        environment = os.environ | (KEEPING_MEMORY if side.endswith("_malloc") else {})
        used, own = busy_seconds()
        with open(log, "w") as output:
            begun = time.monotonic()
            process = subprocess.Popen(
                self.command(side, run, steps, minutes),
                cwd=self.texts,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                first_step = self.wait_for_step(process, run / "metrics.jsonl", begun)
                code = process.wait(RUN_TIMEOUT)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds = time.monotonic() - begun
        used, own = (after - before for after, before in zip(busy_seconds(), (used, own)))
        disturbance = max(0.0, used - own) / (seconds * os.cpu_count())
        if code != 0:
            sys.exit(f"job: {side} ended with {code}:\n{log.read_text()[-3000:]}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        taken = [line for line in lines if "loss" in line]
        done = len(taken) if minutes > 0 else steps
        if not taken or [line["step"] for line in taken] != list(range(1, done + 1)):
            sys.exit(f"job: expected {steps} steps of {side}, got {len(taken)}:\n{log.read_text()[-3000:]}")
        config = json.loads((run / "config.json").read_text())
        shutil.rmtree(run)  # with its checkpoints
        validated = [line["val_nats_per_byte"] for line in lines if "val_nats_per_byte" in line]
        return Run(taken, first_step, config, disturbance, validated[-1] if validated else None)

    @staticmethod
    def wait_for_step(process, metrics, begun):
        while process.poll() is None and time.monotonic() - begun < RUN_TIMEOUT:
            if metrics.exists() and b'"loss"' in metrics.read_bytes():
                return time.monotonic() - begun
            time.sleep(POLL)
        return float("nan")


def check_settings(ours, peer, side):
    """Both sides have to have been told the same, by flags or by default."""
    for name, value in peer.config.items():
        if name in ("run", "parallel", "data", "validation-data", "final-validation"):
            continue
        given = ours.config[name]
        if (given != value) if isinstance(value, str) else (float(given) != float(value)):
            sys.exit(f"job: expected equal settings, got --{name} {ours.config[name]}, and {value} with {side}")


def bound_median(values):
    """Where the median lies with 95 % confidence, or all that so few values can give: as statistics.cpp."""
    values, count = sorted(values), len(values)
    tail = outside = 0.5**count
    cut = 0
    for k in range(1, count // 2):
        tail *= (count - k + 1) / k
        if 2 * (outside + tail) > 0.05:
            break
        outside += tail
        cut = k
    return values[cut], values[count - 1 - cut]


def text_of(number):
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def compared(row, ranks, ours, peer, theirs, ratios):
    low, high = bound_median(ratios)
    numbers = [statistics.median(ours), statistics.median(theirs), statistics.median(ratios), low, high]
    tessera, value, ratio, low, high = map(text_of, numbers)
    return [row, ranks, tessera, peer, value, ratio, low, high]


def difference(a, b):
    """The largest and the mean of how far losses are from each other at equal steps."""
    far = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return max(far), statistics.mean(far)


def loss_rows(bench, modes):
    steps, ranks = bench.options.loss_steps, bench.options.ranks
    runs = {}
    for side in [*modes, "ddp", "fsdp2"]:
        runs[side] = bench.run(side, steps)
        print(f"{side}: loss {runs[side].losses()[-1]:.4f} after {steps} steps", flush=True)
    noise = difference(runs["ddp"].losses(), runs["fsdp2"].losses())
    for mode in modes:
        peer = MODES[mode][0]
        check_settings(runs[mode], runs[peer], peer)
        ours, theirs = runs[mode].losses(), runs[peer].losses()
        first = difference(ours[:COMPARED_FIRST], theirs[:COMPARED_FIRST])[0]
        if first > LARGEST_FIRST:
            sys.exit(f"job: {mode} and {peer} do not train the same: losses differ by {first:.4g} at once")
        far = difference(ours, theirs)
        for name, value, yardstick in zip(("largest", "mean"), far, noise):
            row = f"{name} loss difference {mode} to {peer} over {steps} steps"
            ratio = f"{value / yardstick:.3g}" if yardstick > 0 else ""
            yield [row, ranks, f"{value:.3g}", "ddp to fsdp2", f"{yardstick:.3g}", ratio, "", ""]
        row = [f"loss {mode} after {steps} steps", ranks, f"{ours[-1]:.4f}", peer, f"{theirs[-1]:.4f}"]
        yield [*row, f"{ours[-1] / theirs[-1]:.5f}", "", ""]


def timed_round(bench, sides):
    round_ = {}
    for side in sides:
        run = round_[side] = bench.run(side, bench.options.steps)
        speed = run.tokens_per_s(bench.options.skip)
        others = f", others took {run.disturbance:.0%}" if run.disturbance > QUIET else ""
        print(f"{side}: {speed:.0f} tokens/s, first step after {run.first_step:.2f} s{others}", flush=True)
    return round_


def timed_rounds(bench, sides):
    """As many rounds as asked for; if the machine is never quiet, the quietest of twice as many."""
    def disturbance(round_):
        return max(run.disturbance for run in round_.values())

    rounds, pairs = [], bench.options.pairs
    while sum(disturbance(each) <= QUIET for each in rounds) < pairs and len(rounds) < 2 * pairs:
        print(f"round {len(rounds) + 1}", flush=True)
        rounds.append(timed_round(bench, sides if len(rounds) % 2 == 0 else sides[::-1]))
    quietest = sorted(rounds, key=disturbance)[:pairs]
    print(f"other programs took at most {disturbance(quietest[-1]):.0%} of the cores in the {pairs} rounds that count")
    return quietest


def speed_rows(bench, modes):
    options = bench.options
    sides = [side for mode in modes for side in (mode, *MODES[mode])]
    rounds = timed_rounds(bench, sides)
    runs = {side: [each[side] for each in rounds] for side in sides}
    tokens = {side: [run.tokens_per_s(options.skip) for run in runs[side]] for side in sides}
    starts = {side: [run.first_step for run in runs[side]] for side in sides}
    for mode in modes:
        for peer in MODES[mode]:
            ratios = [ours / theirs for ours, theirs in zip(tokens[mode], tokens[peer])]
            yield compared(f"tokens/s {mode}", options.ranks, tokens[mode], peer, tokens[peer], ratios)
        for peer in MODES[mode]:
            ratios = [theirs / ours for ours, theirs in zip(starts[mode], starts[peer])]
            yield compared(f"seconds to first step {mode}", options.ranks, starts[mode], peer, starts[peer], ratios)


def quality_rows(bench, modes):
    """What a text costs after the same time."""
    options = bench.options
    for mode in modes:
        peer = MODES[mode][-1]
        runs = {side: bench.run(side, options.full_steps, options.minutes) for side in (mode, peer)}
        for side, run in runs.items():
            print(f"{side}: {run.nats_per_byte:.4f} nats per byte after {len(run.steps)} steps", flush=True)
        ours, theirs = (runs[side].nats_per_byte for side in (mode, peer))
        row = f"nats per byte {mode} in {options.minutes:g} minutes"
        yield [row, options.ranks, f"{ours:.4f}", peer, f"{theirs:.4f}", f"{theirs / ours:.4f}", "", ""]
        steps = [len(runs[side].steps) for side in (mode, peer)]
        yield [f"steps {mode} in {options.minutes:g} minutes", options.ranks, steps[0], peer, steps[1],
               f"{steps[0] / steps[1]:.4f}", "", ""]


def verdicts(rows, modes):
    def say(what, value, target, met):
        return f"{what}: {value:.3g}, target {target}: {'met' if met else 'MISSED'}"

    for mode in modes:
        speeds = [row for row in rows if row[0] == f"tokens/s {mode}"]
        if speeds:
            better = max(speeds, key=lambda row: float(row[4]))
            ratio, target = float(better[5]), TOKENS_TARGETS[mode]
            yield say(f"tokens/s {mode} against the better peer, {better[3]}", ratio, target, ratio >= target)
            start = next(float(row[2]) for row in rows if row[0] == f"seconds to first step {mode}")
            yield say(f"seconds to first step {mode}", start, START_TARGET, start < START_TARGET)


def describe_machine(options):
    version = [options.python, "-c", "import torch; print(torch.__version__)"]
    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return (
        f"date: {datetime.date.today()}\nprocessor: {cpu[0] if cpu else 'unknown processor'}\n"
        f"cores: {os.cpu_count()}\nmemory: {memory:.0f} GiB\nkernel: {platform.system()} {platform.release()}\n"
        f"torch: {subprocess.run(version, capture_output=True, text=True, check=True).stdout}"
    )


def recipe_of_main_job():
    """Its settings but for those that are ours alone, as both sides are told them; and how many steps it has at most."""
    script = ROOT / "scripts/train_flags.sh"
    flags = subprocess.run([script, "--device", "cpu"], check=True, capture_output=True, text=True).stdout.split()
    settings, kept, steps = [], True, 0
    for i, word in enumerate(flags):
        if word.startswith("--"):
            kept = word not in OURS_ALONE
            steps = int(flags[i + 1]) if word == "--steps" else steps
        if kept:
            settings.append(str(ROOT / word) if flags[i - 1] == "--tokenizer" else word)
    return settings, steps


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="modes and their peers")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=6, help="rounds of timed runs; 0: losses alone")
    parser.add_argument("--steps", type=int, default=40, help="of a timed run")
    parser.add_argument("--skip", type=int, default=5, help="first steps that are not timed")
    parser.add_argument("--loss-steps", type=int, default=200, help="0: no losses")
    parser.add_argument("--minutes", type=float, default=2.0, help="of the runs that are compared by quality; 0: none")
    parser.add_argument("--data", nargs="+", help="texts in place of the main job's; without --minutes")
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--tool", default=str(ROOT / "build/release/bin/tessera"))
    parser.add_argument("--python", default=os.environ.get("TESSERA_PYTHON", str(ROOT / ".venv/bin/python")))
    parser.add_argument("settings", nargs="*", help="for both sides, after --, e.g. -- --blocks 2")
    options = parser.parse_args()
    unknown = [mode for mode in options.modes.split(",") if mode not in MODES]
    if unknown:
        parser.error(f"expected modes of {', '.join(MODES)}, got {unknown[0]}")
    options.recipe, options.full_steps = recipe_of_main_job()
    options.validation_data = None
    if options.data is None:
        options.data, options.validation_data = [str(TEXT / "train")], str(TEXT / "validation")
        if not TEXT.is_dir():
            parser.error(f"expected the text in {TEXT}; make it with scripts/main_job_text.py unpack {TEXT}")
    else:
        options.minutes = 0
    if options.steps <= options.skip:
        parser.error(f"expected more --steps than --skip {options.skip}, got {options.steps}")
    for program in (options.tool, options.python):
        if not os.access(program, os.X_OK):
            parser.error(f"expected a program at {program}; `make bench-job` builds what is needed")
    return options


def main():
    options = parse_options()
    if options.list:
        for mode, peers in MODES.items():
            print(f"{mode}: {','.join(peers)}")
        return
    modes = options.modes.split(",")
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)  # now, not when all is measured
    rows = []
    with tempfile.TemporaryDirectory(prefix="tessera-job-") as folder:
        bench = Bench(options, pathlib.Path(folder))
        rows += loss_rows(bench, modes) if options.loss_steps > 0 else []
        rows += speed_rows(bench, modes) if options.pairs > 0 else []
        rows += quality_rows(bench, ["replicate"]) if options.minutes > 0 and "replicate" in modes else []
    print("\n".join(["", *("  ".join(str(field) for field in row) for row in rows), *verdicts(rows, modes)]))
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        options.csv.with_suffix(".machine.txt").write_text(describe_machine(options))


if __name__ == "__main__":
    main()
