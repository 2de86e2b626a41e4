#!/usr/bin/env python3
"""Where results lie: our distributed tensors against PyTorch's, one rank of the comparison.

The same call runs on both, with its inputs placed in every way on a mesh of one dimension. Compared are the placements
of the results and the bytes that a rank sends during the call, counted alike for both (see `sent`). What is left to do
afterwards counts too: ours are brought to where PyTorch's lie, or, where these are Partial and ours are not the same,
both are brought to Replicate. A row is
 - equal: results lie alike and as much was sent;
 - less: ours sent no more, with what is left to do;
 - otherwise: no more was sent in the call, and both are sharded, along different dimensions: neither is nearer to the
   whole;
 - later: less was sent in the call, and ours have more left to do (sharded and not gathered, or partial and not reduced);
 - explained: ours sent more, and EXPLAINED says why;
 - worse: ours sent more. There must be none.
Calls that PyTorch refuses or of which its result is wrong are left out. All but the equal rows are printed. The last
line is "operators N rows N equal N less N otherwise N later N explained N worse N refused N wrong N".

    placements_peer.py LIBRARY RANK WORLD_SIZE INIT_METHOD STORE
"""

import itertools
import logging
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_rank import argument_parser, counts_line, join, tensors_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

try:
    from torch.distributed.tensor import _decompositions
except ImportError:
    _decompositions = None  # of another version

ours = torch.ops.tessera_test

MATRIX = (256, 512)
SQUARE = (256, 256)
CUBE = (8, 128, 256)
IMAGE = (4, 8, 64, 64)
HEADS = (4, 8, 64, 32)


class Index:
    """An input of whole numbers in [0, bound)."""

    def __init__(self, shape, bound):
        self.shape, self.bound = shape, bound


ONE_MATRIX = {
    "relu": torch.relu,
    "exp": torch.exp,
    "neg": torch.neg,
    "abs": torch.abs,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x: x.rsqrt(),
    "pow": lambda x: x**2,
    "clamp": lambda x: x.clamp(-1, 1),
    "mul by number": lambda x: x * 3,
    "add number": lambda x: x + 3,
    "div by number": lambda x: x / 3,
    "to double": lambda x: x.to(torch.float64),
    "clone": torch.clone,
    "detach": lambda x: x.detach(),
    "zeros_like": torch.zeros_like,
    "sum": torch.sum,
    "sum dim": lambda x: x.sum(0),
    "sum keepdim": lambda x: x.sum(1, keepdim=True),
    "mean": torch.mean,
    "mean dim": lambda x: x.mean(1),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(1),
    "max": torch.max,
    "min": torch.min,
    "prod": lambda x: x.prod(0),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(0),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "logsumexp": lambda x: x.logsumexp(1),
    "argmax": lambda x: x.argmax(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(0),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(4, dim=0),
    "tril": torch.tril,
    "view": lambda x: x.view(256, 8, 64),
    "view joins": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(16, 16, 512),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.expand(2, 256, 512),
    "repeat": lambda x: x.repeat(2, 1),
    "slice": lambda x: x[:, :100],
    "select": lambda x: x[3],
    "split": lambda x: x.split(128, 1),
    "chunk": lambda x: x.chunk(2, 0),
    "flip": lambda x: x.flip(0),
    "pad": lambda x: F.pad(x, (1, 1)),
}
# Without convolutions: for most placements PyTorch gives wrong results, or errors on some ranks alone.
MORE = {
    "squeeze": (lambda x: x.squeeze(1), (256, 1, 512)),
    "unbind": (lambda x: x.unbind(0), (4, 128, 256)),
    "flatten": (lambda x: x.flatten(0, 1), CUBE),
    "movedim": (lambda x: x.movedim(0, 2), CUBE),
    "add": (torch.add, MATRIX, MATRIX),
    "sub": (torch.sub, MATRIX, MATRIX),
    "mul": (torch.mul, MATRIX, MATRIX),
    "div": (torch.div, MATRIX, MATRIX),
    "maximum": (torch.maximum, MATRIX, MATRIX),
    "add broadcast": (torch.add, MATRIX, (512,)),
    "mul broadcast": (torch.mul, MATRIX, (256, 1)),
    "gt": (torch.gt, MATRIX, MATRIX),
    "add in place": (lambda x, y: x.clone().add_(y), MATRIX, MATRIX),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.25), MATRIX, MATRIX),
    "mm": (torch.mm, MATRIX, (512, 128)),
    "matmul vector": (torch.mv, MATRIX, (512,)),
    "dot": (torch.dot, (65536,), (65536,)),
    "bmm": (torch.bmm, CUBE, (8, 256, 64)),
    "matmul": (torch.matmul, CUBE, (256, 64)),
    "linear": (lambda x, w: F.linear(x, w), CUBE, (64, 256)),
    "linear bias": (lambda x, w, b: F.linear(x, w, b), MATRIX, (64, 512), (64,)),
    "addmm": (torch.addmm, (256, 128), MATRIX, (512, 128)),
    "baddbmm": (torch.baddbmm, (8, 128, 64), CUBE, (8, 256, 64)),
    "cat": (lambda x, y: torch.cat([x, y], 0), MATRIX, MATRIX),
    "stack": (lambda x, y: torch.stack([x, y], 1), MATRIX, MATRIX),
    "where": (lambda x, y: torch.where(x > y, x, y), MATRIX, MATRIX),
    "embedding": (lambda w, i: F.embedding(i, w), MATRIX, Index((64, 8), 256)),
    "gather": (lambda x, i: x.gather(1, i), MATRIX, Index((256, 16), 512)),
    "index_select": (lambda x, i: x.index_select(0, i), MATRIX, Index((64,), 256)),
    "scatter": (lambda x, i: x.scatter(1, i, 2.0), MATRIX, Index((256, 16), 512)),
    "mse_loss": (F.mse_loss, MATRIX, MATRIX),
    "cross_entropy": (F.cross_entropy, MATRIX, Index((256,), 512)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (512,), w, b), MATRIX, (512,), (512,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (512,), w), MATRIX, (512,)),
    "group_norm": (lambda x: F.group_norm(x, 4), IMAGE),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), IMAGE),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), IMAGE),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    "attention": (lambda q, kv: F.scaled_dot_product_attention(q, kv, kv), HEADS, HEADS),
    "dropout at rest": (lambda x: F.dropout(x, 0.5, training=False), MATRIX),
}

# (operator, what PyTorch's placements begin with) of calls that may send more than PyTorch's, and why.
INTERVALS = "PyTorch joins a dimension with one that is sharded into a strided shard; ours hold intervals"
EXPLAINED = {
    ("view joins", "_S"): INTERVALS,
    ("flatten", "_S"): INTERVALS,
    ("matmul", "S1"): INTERVALS,
    ("linear", "S1"): INTERVALS,
    ("cross_entropy", "Pavg"): "the mean over targets that count is no average of means: ours count them",
}


def cases():
    for name, call in ONE_MATRIX.items():
        yield name, call, [MATRIX]
    for name, (call, *inputs) in MORE.items():
        yield name, call, inputs


def choices(shape, is_float):
    dims = [f"S{dim}" for dim, size in enumerate(shape) if size % 2 == 0]
    return ["R", *dims] + (["Psum"] if is_float else [])


def sent(kind, nbytes, ranks):
    """Bytes that a rank sends in a collective with this much input, by the best algorithm."""
    factor = {
        "all_gather": ranks - 1,
        "all_reduce": 2 * (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks,
        "broadcast": 1,
    }[kind]
    return nbytes * factor


class Traffic(TorchDispatchMode):
    """Bytes that PyTorch's distributed tensors send."""

    KINDS = {
        "_c10d_functional::all_gather_into_tensor": "all_gather",
        "_c10d_functional::all_reduce": "all_reduce",
        "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
        "_c10d_functional::all_to_all_single": "all_to_all",
        "_c10d_functional::broadcast": "broadcast",
    }
    QUIET = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.bytes, self.is_exchange = ranks, 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind is DTensor for kind in types):
            return NotImplemented  # only what it does underneath counts
        name = func._schema.name
        if name in self.KINDS:
            kind = "all_to_all" if self.is_exchange else self.KINDS[name]
            self.bytes += sent(kind, args[0].nbytes, self.ranks)
        elif name.startswith(("_c10d_functional::", "c10d::", "_dtensor::")) and name not in self.QUIET:
            raise AssertionError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


def count_exchanges_as_such():
    """On gloo PyTorch gathers and cuts in place of an all-to-all; it shall not be blamed for that."""
    exchange = placement_types.shard_dim_alltoall

    def counted(*args, **kwargs):
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        if not isinstance(mode, Traffic):
            return exchange(*args, **kwargs)
        mode.is_exchange = True
        try:
            return exchange(*args, **kwargs)
        finally:
            mode.is_exchange = False

    placement_types.shard_dim_alltoall = counted


def remember_decompositions():
    """For an operator without a rule PyTorch tries all placements of its inputs, and all of them again for the next
    row: of attention's rows that is nearly all the time this program takes."""
    strategy = getattr(_decompositions, "DecompShardingStrategy", None)
    if strategy is None:
        return
    propagate = strategy._propagate_through_decomp
    known = {}

    def remembered(self, schema, placements, mesh):
        arguments = (schema.args_schema, schema.kwargs_schema)
        shapes = pytree.tree_map_only(DTensorSpec, shape_of, arguments)
        key = (schema.op, tuple(placements), repr(shapes))
        if key not in known:
            try:
                known[key] = (propagate(self, schema, placements, mesh), None)
            except Exception as error:  # noqa: BLE001 - which it is, is for PyTorch to judge
                known[key] = (None, error)
        result, error = known[key]
        if error is not None:
            raise error
        return result

    strategy._propagate_through_decomp = remembered


def shape_of(spec):
    return tuple(spec.shape), spec.tensor_meta.dtype


def take_sent(ranks):
    return sum(sent(kind, nbytes, ranks) for kind, nbytes in ours.take_traffic().items())


def text_of(placement):
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        # Its masked partial is a sum whose parts are masked later than ours.
        return "Pnorm" if type(placement).__name__ == "_NormPartial" else f"P{placement.reduce_op}"
    return f"S{placement.dim}" if type(placement) is Shard else str(placement)


def summand(whole, mesh):
    return whole if mesh.get_local_rank() == 0 else torch.zeros_like(whole)


def place_theirs(whole, text, mesh):
    if text == "Psum":
        return DTensor.from_local(summand(whole, mesh), mesh, [Partial()])
    return distribute_tensor(whole, mesh, [Replicate() if text == "R" else Shard(int(text[1:]))])


def place_ours(whole, text, mesh):
    if text == "Psum":
        return ours.from_local(summand(whole, mesh), [mesh.size()], ["Psum"])
    return ours.distribute(whole, [mesh.size()], [text])


def nearness(placements):
    """How near results are to the whole: partial, sharded, whole."""
    return min("PSR".index(placement[0]) if placement[0] in "PSR" else 1 for placement in placements)


class Row:
    """One call with its inputs placed in one way."""

    def __init__(self, mesh):
        self.mesh, self.ranks = mesh, mesh.size()

    def run_theirs(self, call, wholes, placements):
        placed = [place_theirs(*pair, self.mesh) for pair in zip(wholes, placements)]
        with Traffic(self.ranks) as traffic:
            results = tensors_of(call(*placed))
            self.theirs = [text_of(result.placements[0]) for result in results]
            self.sent_by_theirs = traffic.bytes
        with Traffic(self.ranks) as traffic:
            wholes = [result.full_tensor() for result in results]
            self.theirs_to_whole = traffic.bytes
        return wholes

    def run_ours(self, call, wholes, placements):
        placed = [place_ours(*pair, self.mesh) for pair in zip(wholes, placements)]
        ours.take_traffic()
        results = tensors_of(call(*placed))
        self.sent_by_ours = take_sent(self.ranks)
        self.ours = [ours.placements(result)[0] for result in results]
        pairs = list(zip(self.ours, self.theirs))
        self.to_whole = any(mine != goal and not (goal == "R" or goal[1:].isdigit()) for mine, goal in pairs)
        for result, (mine, goal) in zip(results, pairs):
            if mine != goal or self.to_whole:
                ours.redistribute(result, ["R" if self.to_whole else goal])
        self.left = take_sent(self.ranks)
        return [ours.full_tensor(result) for result in results]

    def verdict(self):
        theirs = self.sent_by_theirs + (self.theirs_to_whole if self.to_whole else 0)
        if self.sent_by_ours + self.left <= theirs:
            return "equal" if self.ours == self.theirs and self.sent_by_ours == self.sent_by_theirs else "less"
        ahead = nearness(self.theirs) - nearness(self.ours)
        if ahead == 0 and "P" not in self.ours[0] and self.sent_by_ours <= self.sent_by_theirs:
            return "otherwise"
        return "later" if ahead > 0 and self.sent_by_ours < self.sent_by_theirs else "worse"

    def reason(self, name):
        return next((why for (op, goal), why in EXPLAINED.items() if op == name and self.theirs[0].startswith(goal)), None)

    def describe(self):
        goal = "Replicate" if self.to_whole else "theirs"
        more = f" (and {self.theirs_to_whole:.0f} to Replicate)" if self.to_whole else ""
        return (
            f"ours {','.join(self.ours)} sent {self.sent_by_ours:.0f} (and {self.left:.0f} to become {goal}), "
            f"theirs {','.join(self.theirs)} sent {self.sent_by_theirs:.0f}{more}"
        )


def draw(entry):
    if isinstance(entry, Index):
        return torch.randint(entry.bound, entry.shape)
    return torch.rand(entry) + 0.5


def agree(left, right):
    pairs = zip(left, right, strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)


def answer_of_theirs(row, call, wholes, placements, expected):
    """None, or why there is nothing to compare with; all ranks say the same."""
    problem = ("right", "")
    try:
        if not agree(row.run_theirs(call, wholes, placements), expected):
            problem = ("wrong", f"{','.join(row.theirs)} is not what the plain call gives")
    except Exception as error:  # noqa: BLE001 - whatever it is, there is no answer
        problem = ("refused", str(error).splitlines()[0][:120])
    kinds = ("right", "wrong", "refused")
    worst = torch.tensor(kinds.index(problem[0]))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst == 0:
        return None
    return problem if kinds[worst] == problem[0] else (kinds[worst], "on another rank")


def compare(name, call, inputs, mesh, counts, report):
    wholes = [draw(entry) for entry in inputs]
    expected = tensors_of(call(*wholes))
    is_compared = False
    for placements in itertools.product(*(choices(whole.shape, whole.is_floating_point()) for whole in wholes)):
        row = Row(mesh)
        text = f"{name} {','.join(placements)}"
        if problem := answer_of_theirs(row, call, wholes, placements, expected):
            counts[problem[0]] += 1
            report(f"{problem[0]} by PyTorch: {text}: {problem[1]}")
            continue
        if not agree(row.run_ours(call, wholes, placements), expected):
            raise AssertionError(f"ours are wrong: {text}")
        is_compared = True
        verdict, because = row.verdict(), ""
        if verdict == "worse" and row.reason(name):
            verdict, because = "explained", f", {row.reason(name)}"
        counts["rows"] += 1
        counts[verdict] += 1
        if verdict != "equal":
            report(f"{verdict}{because}: {text}: {row.describe()}")
    counts["operators"] += is_compared


def main():
    parser = argument_parser()
    parser.add_argument("store", help="a file for PyTorch's ranks to meet at")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    join(options)
    store = dist.FileStore(options.store, options.world_size)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.world_size)
    count_exchanges_as_such()
    remember_decompositions()
    mesh = init_device_mesh("cpu", (options.world_size,))
    names = ("operators", "rows", "equal", "less", "otherwise", "later", "explained", "worse", "refused", "wrong")
    counts = dict.fromkeys(names, 0)
    report = print if options.rank == 0 else lambda line: None
    for name, call, inputs in cases():
        if options.only in (None, name):
            compare(name, call, inputs, mesh, counts, report)
    report(counts_line(counts))
    sys.stdout.flush()
    ours.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
