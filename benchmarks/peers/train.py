#!/usr/bin/env python3
"""One rank of PyTorch's side of `tessera bench train`, which starts it and asks for one thing at a time.

Standard input brings one request per line, standard output takes one line of JSON per answer:

    (start)        rank 0: {"port": P}, where it serves the store; the other ranks then read P
    (start)        {"ready": version of torch}
    job J M V      {"job": J}: forgets the job before it, and makes job J in mode M, variant V
    train N        {"losses": [...], "parameters": [[numel, sum, norm, samples...], ...]} after N steps
    time N         {"seconds": s} for N steps, after a tenth more that warm up
    memory N       {"steady": bytes, "peak": bytes}: what the process holds of a GPU while warm steps run, and at most since
                   the job began; N steps warm up
    kernels N      {"kernels": [[name, microseconds, begin], ...]} of one step on a GPU, after N that warm up
    end of input   leaves
"""

import argparse
import datetime
import gc
import importlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from jobs import Job

# mode: the module in this folder that parallelises a model
MODES = {"eager": "plain", "replicate": "ddp", "fully_shard": "fsdp", "tp": "tp"}
SAMPLES = 64
MEMORY_STEPS = 2
MEMORY_LATER_STEPS = 8
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


def join(channel, rank, world_size, device):
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, TIMEOUT, wait_for_workers=False)
        channel.answer(port=store.port)
    else:
        store = dist.TCPStore("127.0.0.1", int(sys.stdin.readline()), world_size, False, TIMEOUT)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


class Trainer:
    """Variants: eager; compile: forward and loss by torch.compile; graph: the whole step is one CUDA graph;
    graph_compile: both. On CUDA all of them compute in bf16 by autocast."""

    def __init__(self, job, mode, device, variant):
        self.job = job
        self.device = device
        self.model = mode.parallelise(job.model)
        self.is_graph = variant.startswith("graph")
        options = {"capturable": True} if self.is_graph else {}
        self.optimizer = mode.make_optimizer(self.model, torch.optim.AdamW, **options)
        self.loss = torch.compile(self.eager_loss) if variant.endswith("compile") else self.eager_loss
        self.step = self.captured_step() if self.is_graph else self.plain_step

    def eager_loss(self):
        with torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.device.type == "cuda",
            cache_enabled=not self.is_graph,
        ):
            return self.job.loss_of(self.model(self.job.input), self.job.target)

    def plain_step(self):
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss

    def captured_step(self):
        """Warms up and captures, then puts weights and optimizer back to where they were."""
        weights = [parameter.detach().clone() for parameter in self.job.model.parameters()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.plain_step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads may call CUDA meanwhile
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
        with torch.no_grad():
            for parameter, before in zip(self.job.model.parameters(), weights):
                parameter.copy_(before)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()

        def replay():
            graph.replay()
            return loss

        return replay

    def wait_for_device(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def train(self, steps):
        losses = [self.step().item() for _ in range(steps)]
        return {"losses": losses, "parameters": list(self.job.model.parameters())}

    def time(self, steps):
        for _ in range(steps // 10 + 1):
            self.step()
        dist.barrier()
        self.wait_for_device()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait_for_device()
        return {"seconds": time.perf_counter() - start}

    def memory(self, steps):
        """As LocalSide::memory() in train_sides.cpp."""
        for _ in range(steps):
            self.step()
        self.wait_for_device()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(MEMORY_STEPS):
            self.step()
        self.wait_for_device()
        steady = torch.cuda.max_memory_reserved()
        for _ in range(MEMORY_LATER_STEPS):
            self.step()
        self.wait_for_device()
        return {"steady": steady, "peak": max(peak, torch.cuda.max_memory_reserved())}

    def kernels(self, steps):
        for _ in range(steps):
            self.step()
        self.wait_for_device()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            self.wait_for_device()
        spans = [
            (event.name, event.time_range)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        first = min((span.start for _, span in spans), default=0)
        return {"kernels": [[name, span.elapsed_us(), span.start - first] for name, span in spans]}


def fingerprint(parameter):
    """As fingerprint() in train_sides.cpp."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    flat = whole.detach().reshape(-1).cpu().double()
    sampled = flat[:: max(flat.numel() // SAMPLES, 1)]
    return [flat.numel(), flat.sum().item(), flat.norm().item(), *sampled.tolist()]


class Peer:
    """One job after another, in a process that stays."""

    def __init__(self, rank, device):
        self.rank = rank
        self.device = device
        self.trainer = None

    def forget(self):
        """A graph that outlives the group makes its end hang; FSDP2 leaves cycles that hold the group."""
        self.trainer = None
        gc.collect()
        torch.compiler.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def answer(self, what, *words):
        if what == "job":
            self.forget()
            name, mode, variant = words
            batch_rank = 0 if mode == "tp" else self.rank  # under tensor parallelism all ranks work on one
            job = Job(name, batch_rank, self.device)
            if variant == "jax":
                self.trainer = importlib.import_module("jax_trainer").Trainer(name, job)
            else:
                self.trainer = Trainer(job, importlib.import_module(MODES[mode]), self.device, variant)
            return {"job": name}
        answer = getattr(self.trainer, what)(int(words[0]))
        if what == "train":
            answer["parameters"] = [fingerprint(each) for each in answer["parameters"]]
        return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    options = parser.parse_args()

    channel = Channel()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", options.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if options.world_size > torch.cuda.device_count():  # NCCL takes ranks that share a GPU for hosts of their own
            os.environ["NCCL_HOSTID"] = f"rank{options.rank}"
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_IB_DISABLE", "1")
    join(channel, options.rank, options.world_size, device)
    channel.answer(ready=torch.__version__)
    peer = Peer(options.rank, device)
    for request in channel.requests():
        channel.answer(**peer.answer(*request.split()))
    peer.forget()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
