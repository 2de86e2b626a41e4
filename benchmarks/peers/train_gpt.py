#!/usr/bin/env python3
"""The job of `tessera train` in PyTorch: the same model from the same values, the same text in the same order, the
same optimizer and schedule, with DistributedDataParallel or FSDP2. One rank; torchrun starts them:

    torchrun --standalone --nproc-per-node 2 train_gpt.py --data FOLDER --parallel ddp --run DIR

Flags are those of `tessera train` with the same defaults; DIR gets config.json and metrics.jsonl as there. A
tokenizer.json is read by the package `tokenizers`.
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
SEQUENCES_AT_END = 1024  # of the text to validate on


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


class Tokenizer:
    """Bytes, or a tokenizer.json with byte-level BPE, in which each character of a token stands for a byte."""

    def __init__(self, path):
        self.bpe = None
        self.lengths = torch.ones(BYTES, dtype=torch.long)
        if path != "bytes":
            import tokenizers

            self.bpe = tokenizers.Tokenizer.from_file(path)
            tokens = [self.bpe.id_to_token(i) for i in range(self.bpe.get_vocab_size())]
            self.lengths = torch.tensor([len(token) for token in tokens])

    def __len__(self):
        return len(self.lengths)

    def encode(self, content):
        if self.bpe is None:
            return torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return torch.tensor(self.bpe.encode(content.decode(errors="replace")).ids, dtype=torch.int32)


def read_corpus(paths, tokenizer):
    """The tokens of files and folders as they come, each file once."""
    seen, parts = set(), []
    for path in paths:
        for file in texts_of(path) if os.path.isdir(path) else [path]:
            status = os.stat(file)
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                parts.append(tokenizer.encode(pathlib.Path(file).read_bytes()))
    return torch.cat(parts)


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
    """The text as sequences, which overlap by one token; its end, or another text, is kept for validation."""

    def __init__(self, options, rank, world_size):
        self.tokenizer = Tokenizer(options.tokenizer)
        self.text = read_corpus(options.data, self.tokenizer)
        self.context, self.seed = options.context, options.seed
        self.rank, self.world_size = rank, world_size
        sequences = (len(self.text) - 1) // options.context
        if options.validation_data:
            self.held_out = read_corpus(options.validation_data, self.tokenizer)
            self.samples = sequences
        else:
            kept = max(1, int(options.validation * sequences)) if options.validation > 0 else 0
            self.samples = sequences - kept
            self.held_out = self.text[self.samples * options.context :]
        if self.samples < 1:
            raise ValueError(f"expected more text than {len(self.text)} tokens for --context {options.context}")
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
        return self.split(rows)

    def validation(self, count):
        """The held-out sequences in batches of `count`, the same on all ranks."""
        sequences = (len(self.held_out) - 1) // self.context
        taken = min(sequences, SEQUENCES_AT_END)
        starts = [i * sequences // taken * self.context for i in range(taken)]
        for first in range(0, taken, count):
            yield self.split([self.held_out[start : start + self.context + 1] for start in starts[first : first + count]])

    @staticmethod
    def split(rows):
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


def make_optimizers(model, options):
    """Weight decay for matrices alone: norms and biases have none. Muon's are the matrices in blocks."""
    muons = []
    if options.optimizer == "muon":
        blocks = (model.module if options.parallel == "ddp" else model).blocks
        muons = [p for p in blocks.parameters() if p.dim() == 2]
    apart = {id(p) for p in muons}
    parameters = [p for p in model.parameters() if id(p) not in apart]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizers = [torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), fused=True)]
    if muons:
        rate = {"lr": options.lr, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(muons, weight_decay=options.weight_decay, **rate))
    return optimizers


def learning_rate(options, position):
    if position < options.warmup:
        return options.lr * min(position + 1, options.warmup) / options.warmup
    length = max(1, options.steps - options.warmup)
    passed = min(position - options.warmup, length)
    return options.min_lr + (options.lr - options.min_lr) * (1 + math.cos(math.pi * passed / length)) / 2


class Trainer:
    def __init__(self, options):
        self.options = options
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.batches = Batches(options, self.rank, self.world_size)
        torch.manual_seed(options.seed)
        tokens = len(self.batches.tokenizer)
        model = Gpt(tokens, options.blocks, options.width, options.heads, options.context, options.dropout)
        self.model = parallelize(model, options.parallel)
        torch.manual_seed(options.seed + 1 + self.rank)
        self.optimizers = make_optimizers(self.model, options)
        self.elapsed = 0.0  # seconds, by the clock of rank 0

    def loss(self, tokens, targets):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.precision == "bf16"):
            logits = self.model(tokens)
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def backward(self):
        """The mean loss of this rank's batch."""
        parts = self.options.accumulate
        count = self.options.batch // self.world_size // parts
        total = 0.0
        for part in range(parts):
            tokens, targets = self.batches.next(count)
            if self.options.parallel == "ddp":
                self.model.require_backward_grad_sync = part + 1 == parts
            loss = self.loss(tokens, targets)
            (loss / parts if parts > 1 else loss).backward()
            total += loss.detach()
        return total / parts

    def rate(self, number):
        """By whichever is further: steps, or time."""
        position = number
        if self.options.minutes > 0:
            position = max(number, self.elapsed / (60 * self.options.minutes) * self.options.steps)
        return learning_rate(self.options, position)

    def step(self, rate, begun):
        """Loss and norm of the gradient, of all ranks."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = self.backward()
        if self.options.clip > 0:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        else:
            norm = nn.utils.get_total_norm([parameter.grad for parameter in self.model.parameters()])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        elapsed = time.perf_counter() - begun if self.rank == 0 else 0.0
        values = torch.stack([loss.double(), torch.tensor(elapsed, dtype=torch.double)])
        dist.all_reduce(values)
        self.elapsed = values[1].item()
        return values[0].item() / self.world_size, norm.item()

    @torch.no_grad()
    def validate(self):
        """Mean loss of a token, and nats per byte. Every rank computes all of it."""
        self.model.eval()
        total, tokens, length = 0.0, 0, 0
        for inputs, targets in self.batches.validation(self.options.batch // self.world_size):
            total += self.loss(inputs, targets).item() * targets.numel()
            tokens += targets.numel()
            length += self.batches.tokenizer.lengths[targets].sum().item()
        self.model.train()
        return total / tokens, total / length

    def run(self, metrics):
        tokens, seconds = self.options.batch * self.options.context, 0.0
        recent = collections.deque(maxlen=STEPS_FOR_SPEED)
        start, number = time.perf_counter(), -1
        while number + 1 < self.options.steps and not 0 < 60 * self.options.minutes <= self.elapsed:
            number += 1
            begun, rate = time.perf_counter(), self.rate(number)
            loss, norm = self.step(rate, start)
            recent.append(time.perf_counter() - begun)
            seconds += recent[-1]
            if metrics is None:
                continue
            line = {
                "step": number + 1,
                "loss": loss,
                "lr": rate,
                "tokens_per_s": tokens * len(recent) / sum(recent),
                "tokens": tokens * (number + 1),
                "grad_norm": norm,
                "step_seconds": recent[-1],
                "seconds": seconds,
                "epoch": self.batches.position // self.batches.samples,
            }
            print(json.dumps(line), file=metrics, flush=True)
        if self.options.final_validation:
            loss, nats_per_byte = self.validate()
            line = {"step": number + 1, "val_loss": loss, "val_nats_per_byte": nats_per_byte, "seconds": seconds}
            if metrics is not None:
                print(json.dumps(line), file=metrics, flush=True)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--run", required=True)
    parser.add_argument("--validation-data", nargs="+")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--final-validation", action="store_true", help="as tessera train, which always does")
    numbers = {"blocks": 4, "width": 128, "heads": 4, "context": 128, "steps": 1500, "batch": 16, "accumulate": 1}
    numbers |= {"warmup": 40, "lr": 3e-3, "min-lr": 1e-4, "weight-decay": 0.1, "beta1": 0.9, "beta2": 0.95}
    numbers |= {"clip": 1.0, "seed": 1, "dropout": 0.0, "validation": 0.05, "minutes": 0.0}
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
