#!/usr/bin/env python3
"""PyTorch's operator database through our distributed tensors: one rank of it.

Every float32 sample of every operator runs on inputs placed at random and must give what the plain call gives,
forward and backward. Prints "samples N ran N wrong N sharded N" and one line per operator that failed.

    op_db_peer.py LIBRARY RANK WORLD_SIZE INIT_METHOD SEED [--every N] [--only NAME] [--csv FILE]
"""

import random
import sys

import torch
from peer_rank import argument_parser, counts_line, join, tensors_of
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

ops = torch.ops.tessera


class Placer:
    """Distributes the tensors of a sample, drawing the same placements on every rank."""

    def __init__(self, world_size, seed):
        self.world_size = world_size
        self.random = random.Random(seed)

    def __call__(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided or value.is_nested:
            raise NotImplementedError("not dense")
        choices = ["R"] + [f"S{dim}" for dim in range(value.dim()) if value.shape[dim] > 0] * 2
        leaf = value.detach().clone()
        placed = ops.distribute(leaf, [self.world_size], [self.random.choice(choices)])
        return placed.requires_grad_(value.requires_grad)


def whole(value):
    if isinstance(value, torch.Tensor) and ops.is_dtensor(value):
        return ops.full_tensor(value)
    return value


def is_close(left, right):
    if isinstance(right, torch.Tensor):
        return torch.allclose(left.detach(), right.detach(), rtol=1e-3, atol=1e-4, equal_nan=True)
    return left == right


def gradients(outputs, inputs):
    roots = [out for out in tensors_of(outputs) if out.requires_grad and out.is_floating_point()]
    if not roots:
        return []
    # Each root counts differently, and errors of the forward are not magnified as a sine would.
    total = sum(root.sum() * (0.5 + 0.25 * index) for index, root in enumerate(roots))
    leaves = [leaf for leaf in tensors_of(inputs) if leaf.requires_grad]
    return torch.autograd.grad(total, leaves, allow_unused=True) if leaves else []


def run(op, inputs):
    arguments, keywords = inputs
    return op(*arguments, **keywords)


def try_sample(op, sample, placer):
    """None: skipped; "": right; else what was wrong."""
    plain = ((sample.input, *sample.args), sample.kwargs)
    expected = run(op, plain)
    if not tensors_of(expected) or any(out.layout != torch.strided for out in tensors_of(expected)):
        return None
    placed = pytree.tree_map(placer, plain)
    actual = run(op, placed)
    pairs = list(zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected)))
    if not all(is_close(whole(left), right) for left, right in pairs):
        return f"wrong result, {[str(value)[:60] for pair in pairs for value in map(whole, pair)]}"
    ours, theirs = gradients(actual, placed), gradients(expected, plain)
    for left, right in zip(ours, theirs):
        if (left is None) != (right is None) and (left if right is None else right).abs().max() > 0:
            return "gradient missing"
        if left is not None and right is not None and not is_close(whole(left), right):
            return f"wrong gradient, by {(whole(left) - right).abs().max():.2g} of {right.abs().max():.2g}"
    return ""


def is_random(op):
    """Draws of different placements agree, but not with a plain draw that came before."""
    words = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "cauchy", "geometric")
    return any(word in op.name for word in words) or op.name.startswith("empty") or "new_empty" in op.name


def main():
    parser = argument_parser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--csv", help="also write the counts to this file")
    options = parser.parse_args()
    join(options)
    placer = Placer(options.world_size, options.seed)
    counts = dict(samples=0, ran=0, wrong=0, sharded=0)
    for index, op in enumerate(op_db):
        if index % options.every or torch.float32 not in op.dtypes or is_random(op):
            continue
        if options.only and options.only != op.name:
            continue
        torch.manual_seed(options.seed)
        problems = {}
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
            ops.take_dispatch_counts()
            try:
                problem = try_sample(op, sample, placer)
            except NotImplementedError as error:
                problem = None if str(error) == "not dense" else f"threw {error}"
            except Exception as error:  # noqa: BLE001 - whatever it is, it counts
                problem = f"threw {error}"
            if problem is None:
                continue
            calls, without_rule, kept = ops.take_dispatch_counts()
            counts["samples"] += 1
            counts["ran"] += not problem
            counts["wrong"] += problem.startswith(("wrong", "gradient"))
            counts["sharded"] += not problem and without_rule == 0
            if problem:
                problems.setdefault(problem.splitlines()[0][:160], 0)
                problems[problem.splitlines()[0][:160]] += 1
        if options.rank == 0:
            for problem, count in problems.items():
                print(f"{op.name}.{op.variant_test_name}: {count} x {problem}", flush=True)
    if options.rank == 0:
        print(counts_line(counts), flush=True)
        if options.csv:
            with open(options.csv, "w") as file:
                print(",".join(counts), ",".join(map(str, counts.values())), sep="\n", file=file)
    sys.stdout.flush()
    ops.shutdown()


if __name__ == "__main__":
    main()
