#!/usr/bin/env python3
"""One process of PyTorch's side of `tessera bench compile`: steps of the gpt, from the first one on.

Standard output takes one line of JSON, the same that compile_ready.cpp gives of ours:

    --how eager      {"first": s, "eager": s}: the first step of the process, and a later one
    --how compile    {"total": s, "calls": 1, "kernels": n, "compiled": s}: the first step, which compiles, and a later one

Inductor's cache is in the folder that TORCHINDUCTOR_CACHE_DIR names.
"""

import argparse
import statistics
import time

import plain
import torch
from jobs import JOBS, Job, gpt
from train import Channel, Trainer

STEPS = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--how", required=True, choices=("eager", "compile"))
    options = parser.parse_args()

    channel = Channel()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    JOBS[device.type]["brief"] = gpt(blocks=options.blocks, context=32, batch=2)
    trainer = Trainer(Job("brief", 0, device), plain, device, options.how)

    def seconds():
        trainer.wait_for_device()
        start = time.perf_counter()
        trainer.step()
        trainer.wait_for_device()
        return time.perf_counter() - start

    first = seconds()
    later = statistics.median(seconds() for _ in range(STEPS))
    if options.how == "eager":
        channel.answer(first=first, eager=later)
        return
    from torch._inductor import metrics

    channel.answer(total=first, calls=1, kernels=metrics.generated_kernel_count, compiled=later)


if __name__ == "__main__":
    main()
