#!/usr/bin/env python3
"""The job of `tessera train` in PyTorch: the same model from the same values, the same text in the same order, the
same optimizer and schedule, with DistributedDataParallel or FSDP2. One rank; torchrun starts them:

    torchrun --standalone --nproc-per-node 2 train_gpt.py --data FOLDER --parallel ddp --run DIR

Flags are those of `tessera train` with the same defaults; DIR gets config.json and metrics.jsonl as there.
"""

import argparse
import collections
import gc
import json
import math
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

BYTES = 256  # tokens
STEPS_FOR_SPEED = 20


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.head_size = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)  # features ordered [head, query or key or value, size]
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_size)).permute(3, 0, 2, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):  # [batch, tokens, width]
        x = x + self.dropout(self.attend(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Gpt(nn.Module):
    """As tools/train/model.cpp: names, shapes and, with one seed, values."""

    def __init__(self, vocabulary=BYTES, blocks=4, width=128, heads=4, context=128, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.start_values()

    @torch.no_grad()
    def start_values(self):
        of_residual = 0.02 / math.sqrt(2.0 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                is_residual = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, 0, of_residual if is_residual else 0.02)

    def forward(self, tokens):  # [batch, tokens] -> [batch, tokens, vocabulary]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def texts_of(folder):
    """The text files of a folder in order of path, as tessera::data::Corpus takes them."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("build", "runs", "node_modules")
            and not os.path.islink(os.path.join(place, name))
            and not os.path.exists(os.path.join(place, name, "metrics.jsonl"))
        ]
        found += [os.path.join(place, name) for name in files if not name.startswith(".") and name != "report.html"]
    found.sort(key=lambda path: os.fsencode(os.path.relpath(path, folder)))
    for path in found:
        if os.path.isfile(path) and os.path.getsize(path) > 0:
            with open(path, "rb") as file:
                if b"\0" not in file.read(64 << 10):
                    yield path


def read_corpus(paths):
    """The bytes of files and folders as they come, each file once."""
    seen, parts = set(), []
    for path in paths:
        for file in texts_of(path) if os.path.isdir(path) else [path]:
            status = os.stat(file)
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                parts.append(pathlib.Path(file).read_bytes())
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


class Permutation:
    """An order of 0 … size - 1 drawn by seed and epoch: a Feistel network that is walked until the number is small
    enough, as src/data/sampler.cpp explains."""

    ROUNDS = 12
    MASK = (1 << 64) - 1

    def __init__(self, size, seed, epoch):
        self.size = size
        self.half_bits = ((size - 1).bit_length() + 1) // 2
        key = self.mix_bits(self.mix_bits(seed) ^ epoch)
        self.keys = []
        for _ in range(self.ROUNDS):
            key = self.mix_bits(key)
            self.keys.append(key)

    @classmethod
    def mix_bits(cls, value):
        value = (value + 0x9E3779B97F4A7C15) & cls.MASK
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & cls.MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & cls.MASK
        return value ^ value >> 31

    def encipher(self, value):
        left, right = value >> self.half_bits, value & ((1 << self.half_bits) - 1)
        for key in self.keys:
            left, right = right, left ^ self.mix_bits(right ^ key) >> (64 - self.half_bits)
        return left << self.half_bits | right

    def __getitem__(self, index):
        if self.size == 1:
            return 0
        index = self.encipher(index)
        while index >= self.size:
            index = self.encipher(index)
        return index


class Batches:
    """The text as sequences, which overlap by one token; its end is kept for validation."""

    def __init__(self, options, rank, world_size):
        self.text = read_corpus(options.data)
        self.context, self.seed = options.context, options.seed
        self.rank, self.world_size = rank, world_size
        sequences = (len(self.text) - 1) // options.context
        kept = max(1, int(options.validation * sequences)) if options.validation > 0 else 0
        self.samples = sequences - kept
        if self.samples < 1:
            raise ValueError(f"expected more text than {len(self.text)} bytes for --context {options.context}")
        self.position = 0

    def next(self, count):
        """This rank's `count` sequences of the next count times world_size of them."""
        first = self.position + self.rank * count
        self.position += self.world_size * count
        rows = []
        for place in range(first, first + count):
            epoch, index = divmod(place, self.samples)
            start = Permutation(self.samples, self.seed, epoch)[index] * self.context
            rows.append(self.text[start : start + self.context + 1])
        windows = torch.stack(rows).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def parallelize(model, parallel):
    if parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_optimizer(model, options):
    """Weight decay for matrices alone: norms and biases have none."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), fused=True)


def learning_rate(options, step):
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    length = max(1, options.steps - options.warmup)
    passed = min(step - options.warmup, length)
    return options.min_lr + (options.lr - options.min_lr) * (1 + math.cos(math.pi * passed / length)) / 2


class Trainer:
    def __init__(self, options):
        self.options = options
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.batches = Batches(options, self.rank, self.world_size)
        torch.manual_seed(options.seed)
        model = Gpt(BYTES, options.blocks, options.width, options.heads, options.context, options.dropout)
        self.model = parallelize(model, options.parallel)
        torch.manual_seed(options.seed + 1 + self.rank)
        self.optimizer = make_optimizer(self.model, options)

    def backward(self):
        """The mean loss of this rank's batch."""
        parts = self.options.accumulate
        count = self.options.batch // self.world_size // parts
        total = 0.0
        for part in range(parts):
            tokens, targets = self.batches.next(count)
            if self.options.parallel == "ddp":
                self.model.require_backward_grad_sync = part + 1 == parts
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            (loss / parts if parts > 1 else loss).backward()
            total += loss.detach()
        return total / parts

    def step(self, number):
        """Loss and norm of the gradient, of all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, number)
        loss = self.backward()
        if self.options.clip > 0:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        else:
            norm = nn.utils.get_total_norm([parameter.grad for parameter in self.model.parameters()])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.double()
        dist.all_reduce(loss)
        return loss.item() / self.world_size, norm.item()

    def run(self, metrics):
        tokens, seconds = self.options.batch * self.options.context, 0.0
        recent = collections.deque(maxlen=STEPS_FOR_SPEED)
        for number in range(self.options.steps):
            begun = time.perf_counter()
            loss, norm = self.step(number)
            recent.append(time.perf_counter() - begun)
            seconds += recent[-1]
            if metrics is None:
                continue
            line = {
                "step": number + 1,
                "loss": loss,
                "lr": learning_rate(self.options, number),
                "tokens_per_s": tokens * len(recent) / sum(recent),
                "tokens": tokens * (number + 1),
                "grad_norm": norm,
                "step_seconds": recent[-1],
                "seconds": seconds,
                "epoch": self.batches.position // self.batches.samples,
            }
            print(json.dumps(line), file=metrics, flush=True)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--run", required=True)
    numbers = {"blocks": 4, "width": 128, "heads": 4, "context": 128, "steps": 1500, "batch": 16, "accumulate": 1}
    numbers |= {"warmup": 40, "lr": 3e-3, "min-lr": 1e-4, "weight-decay": 0.1, "beta1": 0.9, "beta2": 0.95}
    numbers |= {"clip": 1.0, "seed": 1, "dropout": 0.0, "validation": 0.05}
    for name, value in numbers.items():
        parser.add_argument("--" + name, type=type(value), default=value)
    parser.set_defaults(warmup=None)
    options = parser.parse_args()
    if options.warmup is None:
        options.warmup = min(numbers["warmup"], options.steps // 10)  # as tessera train has it
    return options


def main():
    options = parse_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() != 0:
        Trainer(options).run(None)
    else:
        folder = pathlib.Path(options.run)
        folder.mkdir(parents=True, exist_ok=True)
        config = {name.replace("_", "-"): value for name, value in vars(options).items()}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        with open(folder / "metrics.jsonl", "x") as metrics:
            Trainer(options).run(metrics)
    gc.collect()  # FSDP2 leaves cycles that hold the group; collected at exit, its threads would abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
