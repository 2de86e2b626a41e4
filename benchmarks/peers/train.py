#!/usr/bin/env python3
"""One rank of PyTorch's side of `tessera bench train`, which starts it and asks for one thing at a time.

Standard input brings one request per line, standard output takes one line of JSON per answer:

    (start)        rank 0: {"port": P}, where it serves the store; the other ranks then read P
    (start)        {"ready": version of torch}
    train N        {"losses": [...], "parameters": [[numel, sum, norm, samples...], ...]} after N steps
    time N         {"seconds": s} for N steps, after a tenth more that warm up
    end of input   leaves
"""

import argparse
import datetime
import importlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from jobs import Job

# mode: the module in this folder that parallelises a model
MODES = {"replicate": "ddp", "fully_shard": "fsdp", "tp": "tp"}
SAMPLES = 64
TIMEOUT = datetime.timedelta(minutes=4)


class Channel:
    """Requests in, answers out. Whatever a library prints goes to standard error instead."""

    def __init__(self):
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def requests(self):
        return iter(sys.stdin.readline, "")

    def answer(self, **values):
        print(json.dumps(values), file=self.answers)


def join(channel, rank, world_size):
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, TIMEOUT, wait_for_workers=False)
        channel.answer(port=store.port)
    else:
        store = dist.TCPStore("127.0.0.1", int(sys.stdin.readline()), world_size, False, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


class Trainer:
    def __init__(self, job, mode):
        self.job = job
        self.model = mode.parallelise(job.model)
        self.optimizer = mode.make_optimizer(self.model, torch.optim.AdamW)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.job.loss_of(self.model(self.job.input), self.job.target)
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, steps):
        losses = [self.step().item() for _ in range(steps)]
        return {"losses": losses, "parameters": [fingerprint(p) for p in self.job.model.parameters()]}

    def time(self, steps):
        for _ in range(steps // 10 + 1):
            self.step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return {"seconds": time.perf_counter() - start}


def fingerprint(parameter):
    """As fingerprint() in train_sides.cpp."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    flat = whole.detach().reshape(-1).double()
    sampled = flat[:: max(flat.numel() // SAMPLES, 1)]
    return [flat.numel(), flat.sum().item(), flat.norm().item(), *sampled.tolist()]


def batch_rank(options):
    """Whose batch: under tensor parallelism all ranks work on one."""
    return 0 if options.mode == "tp" else options.rank


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", required=True)
    parser.add_argument("--mode", required=True, choices=MODES)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    options = parser.parse_args()

    channel = Channel()
    torch.set_num_threads(1)
    join(channel, options.rank, options.world_size)
    trainer = Trainer(Job(options.job, batch_rank(options)), importlib.import_module(MODES[options.mode]))
    channel.answer(ready=torch.__version__)
    for request in channel.requests():
        name, steps = request.split()
        answers = {"train": trainer.train, "time": trainer.time}
        channel.answer(**answers[name](int(steps)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
