#!/usr/bin/env python3
"""PyTorch's operator database through our distributed tensors: one rank of it.

Samples of every operator run on inputs placed at random and must give what the plain call gives, forward and backward.
Prints "samples N ran N wrong N sharded N" and one line per operator that failed.

    op_db_peer.py LIBRARY RANK WORLD_SIZE INIT_METHOD SEED [--every N] [--only NAME] [--csv FILE]
        [--device cuda] [--families A,B,...|all] [--dtype float32] [--samples N]
"""

import random
import sys

import torch
from peer_rank import argument_parser, counts_line, join, load_op_db, tensors_of
from torch.utils import _pytree as pytree

ops = torch.ops.tessera_test

# Operators whose kernels on a GPU are others than on the CPU, or work in another order.
FAMILIES = {
    "random": "bernoulli cauchy exponential geometric log_normal multinomial nn.functional.alpha_dropout "
    "nn.functional.dropout nn.functional.dropout2d normal rand_like randint_like randn_like uniform",
    "ordering": "argmax argsort cummax cummin kthvalue max median min mode msort sort topk unique",
    "indexing": "gather index_add index_copy index_put index_reduce index_select masked_scatter put scatter scatter_add "
    "scatter_reduce take take_along_dim",
    "cumulative": "cumprod cumsum logcumsumexp",
    "reductions": "amax linalg.vector_norm logsumexp mean prod std sum var",
    "linalg": "cholesky_solve linalg.cholesky linalg.det linalg.inv linalg.lu_factor linalg.qr linalg.solve "
    "linalg.solve_triangular matrix_exp",
    "matrix": "addbmm addmm addmv baddbmm bmm einsum matmul mm mv nn.functional.linear tensordot",
    "attention": "nn.functional.multi_head_attention_forward nn.functional.scaled_dot_product_attention",
    "convolution": "nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose2d",
    "norms": "nn.functional.batch_norm nn.functional.group_norm nn.functional.instance_norm nn.functional.layer_norm "
    "nn.functional.rms_norm",
    "embedding": "nn.functional.embedding nn.functional.embedding_bag",
    "losses": "log_softmax nn.functional.cross_entropy nn.functional.nll_loss softmax",
    "images": "grid_sampler_2d nn.functional.interpolate nn.functional.upsample_bilinear nn.functional.upsample_nearest",
    "pooling": "nn.functional.adaptive_avg_pool2d nn.functional.adaptive_max_pool2d nn.functional.avg_pool2d "
    "nn.functional.max_pool1d nn.functional.max_pool2d",
}


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


def tolerance(right):
    """By the largest value where sums lose bits: of low precision, and on a GPU, whose kernels depend on the shape."""
    is_low = right.dtype in (torch.bfloat16, torch.float16)
    loses_bits = right.numel() > 0 and (is_low or (right.is_cuda and right.is_floating_point()))
    largest = right.nan_to_num(nan=0, posinf=0, neginf=0).abs().max().item() if loses_bits else 1
    rtol, atol = (2e-2, 2e-2) if is_low else (1e-3, 1e-4)
    return {"rtol": rtol, "atol": atol * max(1, largest)}


def is_close(left, right):
    if isinstance(right, torch.Tensor):
        right = right.detach()
        return torch.allclose(left.detach(), right, equal_nan=True, **tolerance(right))
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
    """Random operators draw from the same state each time."""
    arguments, keywords = inputs
    torch.manual_seed(7)
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


def is_uninitialised(op):
    return op.name.startswith("empty") or "new_empty" in op.name


def samples_of(op, options):
    """At most so many, spread over all of them."""
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(options.seed)
    samples = list(op.sample_inputs(options.device, dtype, requires_grad=op.supports_autograd))
    step = 1 if options.samples is None else -(-len(samples) // options.samples)
    return samples[:: max(step, 1)]


def chosen_operators(options):
    names = {options.only} if options.only else None
    if options.families:
        families = FAMILIES if options.families == "all" else options.families.split(",")
        names = {name for family in families for name in FAMILIES[family].split()}
    dtype = getattr(torch, options.dtype)
    for index, op in enumerate(load_op_db()):
        dtypes = op.dtypesIfCUDA if options.device == "cuda" else op.dtypes
        if index % options.every == 0 and dtype in dtypes and not is_uninitialised(op):
            if names is None or op.name in names:
                yield op


def main():
    parser = argument_parser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--csv", help="also write the counts to this file")
    parser.add_argument("--families", help=f"of these alone: {', '.join(FAMILIES)}; all")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, help="at most so many of an operator")
    options = parser.parse_args()
    join(options)
    placer = Placer(options.world_size, options.seed)
    counts = dict(samples=0, ran=0, wrong=0, sharded=0)
    for op in chosen_operators(options):
        problems = {}
        for sample in samples_of(op, options):
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
