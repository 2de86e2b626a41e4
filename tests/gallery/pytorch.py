# The cases of docs/gallery.md by PyTorch. run_peers gives torch, rank, world_size and init_process_group, and takes
# outputs: a text of this rank for each report, as bytes. Cases of other numbers of ranks are left out.
import datetime
import os

import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

HANG = datetime.timedelta(seconds=8)  # a collective that takes longer hangs
init_process_group(backend="gloo")
CASES = []


def case(report, ranks):
    return lambda function: CASES.append((report, ranks, function))


def line():
    return init_device_mesh("cpu", (world_size,))


def square(names=("dp", "tp")):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def numbers(*sizes):
    return torch.arange(float(torch.Size(sizes).numel())).view(sizes)


def text_of(tensor):
    return " ".join(f"{value:g}" for value in tensor.detach().double().flatten().tolist())


def text_of_right(values, expected):
    if values.shape != expected.shape:
        return f"sizes {list(values.shape)} instead of {list(expected.shape)}"
    right = torch.isclose(values.detach(), expected.detach(), 1e-4, 1e-5).sum().item()
    return f"{right} of {expected.numel()} right"


def text_or_error(run):
    try:
        return run()
    except Exception as error:
        text = str(error) or type(error).__name__
        if "Timed out" in text:
            return "hangs"
        # Sets are printed in another order each time; "|" would be another cell of the table.
        begin = text.splitlines()[0].partition("{")[0].replace("|", "/").strip()
        return "error: " + (begin if len(begin) <= 64 else begin[:64].rstrip() + "…")


@case("pytorch 179502", 4)
def view_across_shards():
    whole = numbers(12, 8)
    viewed = distribute_tensor(whole, line(), [Shard(1)]).view(16, 6)
    return text_of_right(viewed.full_tensor(), whole.view(16, 6))


@case("pytorch 194457", 4)
def flattened_all_gather():
    mesh = square()
    mesh._flatten()
    tensor = distribute_tensor(numbers(5, 3), mesh, [Shard(0), Shard(0)])
    return text_of(tensor.redistribute(mesh, [Replicate(), Replicate()]).to_local()[:, 0])


@case("pytorch 163193", 2)
def partial_plus_scalar():
    total = distribute_tensor(numbers(10, 1), line(), [Shard(0)]).sum()
    number = text_or_error(lambda: text_of((total + 10).full_tensor()))
    tensor = text_or_error(lambda: text_of((total + torch.tensor(10)).full_tensor()))
    return f"number: {number}, tensor: {tensor}"


@case("pytorch 168134", 4)
def uneven_strided_shard():
    mesh = square()
    whole = distribute_tensor(numbers(5), mesh, [Replicate(), Replicate()])
    placed = whole.redistribute(mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    return f"{text_of(placed.to_local())} of {text_of(placed.full_tensor())}"


@case("pytorch 161368", 4)
def offsets_on_two_dimensions():
    shape, offset = compute_local_shape_and_global_offset(torch.Size([5]), square(), [Shard(0), Shard(0)])
    return f"{shape[0]} at {offset[0]}"


@case("pytorch 172812", 2)
def function_of_parts():
    mesh = line()
    double = local_map(
        lambda x: x * 2, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh
    )
    doubled = double(distribute_tensor(numbers(5), mesh, [Shard(0)]))
    return f"size {doubled.shape[0]}, mean {text_of(doubled.mean().full_tensor())}"


@case("pytorch 162692", 2)
def mean_of_uneven():
    whole = numbers(3, 4)
    return ", ".join(
        text_of(distribute_tensor(part, line(), [Shard(0)]).mean().full_tensor()) for part in (whole, whole[:1])
    )


@case("pytorch 191926", 2)
def convolution_backward():
    mesh = line()
    images = torch.sin(numbers(2, 3, 8, 16))
    weight = torch.cos(numbers(4, 3, 4, 4))

    def convolve(x, w):
        return nn.functional.conv2d(x, w, None, 4).square().sum()

    plain = images.clone().requires_grad_()
    convolve(plain, weight).backward()

    def gradient(dim):
        placed = distribute_tensor(images, mesh, [Shard(dim)]).requires_grad_()
        convolve(placed, distribute_tensor(weight, mesh, [Replicate()])).backward()
        return text_of_right(placed.grad.full_tensor(), plain.grad)

    return ", ".join(
        f"{name}: {text_or_error(lambda: gradient(dim))}" for name, dim in (("height", 2), ("width", 3))
    )


@case("pytorch 174301", 2)
def remembered_keywords():
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy

    register_single_dim_strategy(
        torch.ops.aten.nansum.default, schema_info=RuntimeSchemaInfo(static_kwargkey=["dtype"])
    )(lambda op, arguments, keywords: [[Partial(), _ShardingPlaceholder(0)]])
    tensor = distribute_tensor(numbers(4) + 1, line(), [Shard(0)])
    names = {torch.float64: "double", torch.int32: "int", torch.float32: "float"}
    return " ".join(names[torch.nansum(tensor, dtype=dtype).dtype] for dtype in names)


@case("pytorch 153603", 2)
def remembered_scalar():
    mesh = line()
    means = [DTensor.from_local(torch.ones(1), mesh, [Shard(0)]).mean() for _ in range(3)]
    return " ".join(text_of((mean * (i + 1)).full_tensor()) for i, mean in enumerate(means))


def numbered_linear(inputs, outputs):
    linear = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        linear.weight.copy_(numbers(outputs, inputs))
    return linear


def linear_of_ones(inputs, outputs):
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.ones_(linear.weight)
    return linear


def descend(linear, x):
    linear(x).sum().backward()
    torch.optim.SGD(linear.parameters(), lr=1.0).step()


@case("pytorch 186282", 4)
def sharded_tensor_parallel():
    mesh = square()
    net = numbered_linear(2, 5)
    parallelize_module(net, mesh["tp"], ColwiseParallel())
    fully_shard(net, mesh=mesh["dp"])
    descend(net, torch.tensor([[1.0, 2.0]]))
    return text_of(net.weight.full_tensor()[:, 0])


@case("pytorch 136221", 2)
def uneven_columns():
    x = numbers(1, 5)
    plain, net = numbered_linear(5, 3), numbered_linear(5, 3)
    descend(plain, x)
    fully_shard(net, mesh=line(), shard_placement_fn=lambda parameter: Shard(1))
    descend(net, x)
    return text_of_right(net.weight.full_tensor(), plain.weight)


@case("pytorch 194628", 4)
def sums_of_hybrid_shards():
    net = linear_of_ones(2, 4)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(net, mesh=square(("replicas", "shards")), mp_policy=policy)
    for batch in range(9):
        net.set_requires_all_reduce(batch == 8)
        net(torch.full((1, 2), 256.0 if batch == 0 else 1.0)).sum().backward()
    return text_of(net.weight.grad.full_tensor()[0, 0])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear_of_ones(4, 4), linear_of_ones(4, 4)

    def forward(self, x, uses_both):
        h = self.first(x)
        return h + self.second(h) if uses_both else h


def gradients_of(net):
    gradients = [parameter.grad for parameter in net.parameters()]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]
    return ", ".join("none" if grad is None else text_of(grad[0, 0]) for grad in whole)


@case("pytorch 196996", 2)
def parameter_of_the_last_batch():
    net = Two()
    fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for is_last in (False, True):
        net.set_requires_gradient_sync(is_last)
        net(torch.ones(1, 4), is_last).sum().backward()
    return gradients_of(net)


@case("verl 7458", 2)
def accumulated_gradients():
    net = linear_of_ones(2, 4)
    fully_shard(net)
    for is_last in (False, False, True):
        net.set_requires_gradient_sync(is_last)
        net(torch.full((1, 2), 1.0 + rank)).sum().backward()
        if not is_last:
            parameters = net._get_fsdp_state()._fsdp_param_group.fsdp_params
            kept = sum(parameter._unsharded_param.grad.numel() for parameter in parameters)
    return f"{kept} of {net.weight.numel()} kept, gradient {text_of(net.weight.grad.full_tensor()[0, 0])}"


@case("Ultralytics 24675", 2)
def batch_without_objects():
    def train(steps, **options):
        group = torch.distributed.new_group(list(range(world_size)), timeout=HANG)
        net = Two()
        wrapped = nn.parallel.DistributedDataParallel(net, process_group=group, **options)
        for _ in range(steps):
            wrapped(torch.ones(1, 4), rank == 0).sum().backward()
        return gradients_of(net)

    found = train(1, find_unused_parameters=True)
    without = text_or_error(lambda: train(2))
    return f"{found}; without find_unused_parameters: {without.partition(':')[0]}"


# What PyTorch prints on the way is not for the test's output.
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
for report, ranks, function in CASES:
    if ranks == world_size:
        text = text_or_error(function)
        outputs[report] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        torch.distributed.barrier()
