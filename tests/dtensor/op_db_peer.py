#!/usr/bin/env python3
"""PyTorch's operator database through our distributed tensors: one rank of it.

Samples of every operator run on inputs placed at random, on a mesh drawn from those given, and must give what the plain
call gives, forward and backward. What is refused because the operator itself brings plain tensors along runs again in the
scope of ImplicitReplication. Prints one line per operator that failed, refusals by reason, one line of counts per dtype,
and last "samples N ran N wrong N sharded N replicated N": of those that ran, replicated ones needed the scope.

    op_db_peer.py LIBRARY RANK WORLD_SIZE INIT_METHOD SEED [--every N] [--only NAME] [--csv FILE] [--refusals FILE]
        [--device cuda] [--families A,B,...|all] [--dtypes float32,int64,...] [--samples N] [--meshes 4,2x2]
"""

import collections
import os
import random
import re
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


# How we refuse plain tensors beside distributed ones.
REFUSED_MIX = "got a mix of distributed and plain tensors|expected a distributed tensor for the result"


class Placer:
    """Distributes the tensors of a sample over one mesh, drawing the same placements on every rank."""

    def __init__(self, meshes, seed):
        self.meshes = meshes
        self.random = random.Random(seed)
        self.mesh = meshes[0]

    def choose_mesh(self):
        self.mesh = self.random.choice(self.meshes)

    def __call__(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided or value.is_nested:
            raise NotImplementedError("not dense")
        choices = ["R"] + [f"S{dim}" for dim in range(value.dim()) if value.shape[dim] > 0] * 2
        leaf = value.detach().clone()
        placed = ops.distribute(leaf, self.mesh, [self.random.choice(choices) for _ in self.mesh])
        return placed.requires_grad_(value.requires_grad)


def whole(value):
    if isinstance(value, torch.Tensor) and ops.is_dtensor(value):
        return ops.full_tensor(value)
    return value


def tolerance(right):
    """By the largest value where sums lose bits: of low precision, and on a GPU, whose kernels depend on the shape."""
    if not right.is_floating_point() and not right.is_complex():
        return {"rtol": 0, "atol": 0}
    if right.dtype in (torch.float64, torch.complex128):
        return {"rtol": 1e-6, "atol": 1e-7}
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
    roots = [out for out in tensors_of(outputs) if out.requires_grad]
    roots = [part for out in roots for part in ((out.real, out.imag) if out.is_complex() else (out,))]
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


def try_placed(op, plain, expected, placer):
    """"": right; else what was wrong."""
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


def problem_of(attempt):
    try:
        return attempt()
    except NotImplementedError as error:
        return None if str(error) == "not dense" else f"threw {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it counts
        return f"threw {error}"


def try_sample(op, sample, placer):
    """None: skipped; "": right; else what was wrong. And whether plain tensors had to count as replicated."""
    plain = ((sample.input, *sample.args), sample.kwargs)
    try:
        expected = run(op, plain)
        gradients(expected, plain)
    except Exception:  # noqa: BLE001 - not on this device, or without a formula for it
        return None, False
    if not tensors_of(expected) or any(out.layout != torch.strided for out in tensors_of(expected)):
        return None, False
    expected = run(op, plain)
    placer.choose_mesh()
    problem = problem_of(lambda: try_placed(op, plain, expected, placer))
    if not problem or not re.search(REFUSED_MIX, problem):
        return problem, False
    ops.replicate_plain(True)
    again = problem_of(lambda: try_placed(op, plain, run(op, plain), placer))
    ops.replicate_plain(False)
    return again, True


def is_uninitialised(op):
    return op.name.startswith("empty") or "new_empty" in op.name


def samples_of(op, dtype, options):
    """At most so many, spread over all of them."""
    torch.manual_seed(options.seed)
    learns = op.supports_autograd and dtype in op.supported_backward_dtypes(options.device)
    samples = list(op.sample_inputs(options.device, dtype, requires_grad=learns))
    step = 1 if options.samples is None else -(-len(samples) // options.samples)
    return samples[:: max(step, 1)]


def chosen_operators(dtype, options):
    names = {options.only} if options.only else None
    if options.families:
        families = FAMILIES if options.families == "all" else options.families.split(",")
        names = {name for family in families for name in FAMILIES[family].split()}
    for index, op in enumerate(load_op_db()):
        dtypes = op.dtypesIfCUDA if options.device == "cuda" else op.dtypes
        if index % options.every == 0 and dtype in dtypes and not is_uninitialised(op):
            if names is None or op.name in names:
                yield op


def reason_of(problem):
    """A refusal without what is of one call: operator, sizes, numbers."""
    text = re.sub(r"^threw |\b_?\w+::\w+: ", "", problem.splitlines()[0])
    text = re.sub(r"(INTERNAL ASSERT FAILED).*", r"\1", text)
    text = re.sub(r"'[^']*'|\[[^]]*\]|\d+", "…", text)
    return re.split(r"[;:]|, got|\. ", text)[0].strip()[:100]


def count_samples(dtype, options, placer, refusals):
    counts = dict.fromkeys(("samples", "ran", "wrong", "sharded", "replicated"), 0)
    for op in chosen_operators(dtype, options):
        problems = collections.Counter()
        for sample in samples_of(op, dtype, options):
            ops.take_dispatch_counts()
            problem, is_replicated = try_sample(op, sample, placer)
            if problem is None:
                continue
            calls, without_rule, kept = ops.take_dispatch_counts()
            counts["samples"] += 1
            counts["ran"] += not problem
            counts["wrong"] += problem.startswith(("wrong", "gradient"))
            counts["sharded"] += not problem and without_rule == 0
            counts["replicated"] += not problem and is_replicated
            if problem:
                problems[problem.splitlines()[0][:160]] += 1
            if problem.startswith("threw"):
                refusals[reason_of(problem)][f"{op.name}.{op.variant_test_name}".rstrip(".")] += 1
        if options.rank == 0:
            for problem, count in problems.items():
                print(f"{op.name}.{op.variant_test_name} {dtype}: {count} x {problem}", flush=True)
    return counts


def list_refusals(refusals, file):
    """The most frequent reasons first, with the operators of each."""
    for reason, operators in sorted(refusals.items(), key=lambda item: -sum(item[1].values())):
        names = " ".join(name for name, _ in operators.most_common())
        print(f'{sum(operators.values())},"{reason}",{names}', file=file)


def report(counts, refusals, options):
    print("refused: samples, reason, operators")
    list_refusals(refusals, sys.stdout)
    for dtype, of in counts.items():
        print(f"{dtype}: {counts_line(of)}")
    total = {name: sum(of[name] for of in counts.values()) for name in next(iter(counts.values()))}
    print(counts_line(total), flush=True)
    if options.csv:
        with open(options.csv, "w") as file:
            print("dtype," + ",".join(total), file=file)
            for dtype, of in {"all": total, **counts}.items():
                print(dtype, *of.values(), sep=",", file=file)
    if options.refusals:
        with open(options.refusals, "w") as file:
            print("samples,reason,operators", file=file)
            list_refusals(refusals, file)


def main():
    if os.environ.get("PYTHONHASHSEED") != "0":  # samples come in the order of sets, which must be the ranks' own
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argument_parser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--csv", help="also write the counts to this file")
    parser.add_argument("--refusals", help="and what is refused, by reason, to this one")
    parser.add_argument("--families", help=f"of these alone: {', '.join(FAMILIES)}; all")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--samples", type=int, help="at most so many of an operator in each dtype")
    parser.add_argument("--meshes", help="shapes to draw from, as 4,2x2; one of a line of all ranks")
    options = parser.parse_args()
    join(options)
    meshes = (options.meshes or str(options.world_size)).split(",")
    placer = Placer([[int(size) for size in mesh.split("x")] for mesh in meshes], options.seed)
    refusals = collections.defaultdict(collections.Counter)
    counts = {
        name: count_samples(getattr(torch, name), options, placer, refusals) for name in options.dtypes.split(",")
    }
    if options.rank == 0:
        report(counts, refusals, options)
    sys.stdout.flush()
    ops.shutdown()


if __name__ == "__main__":
    main()
