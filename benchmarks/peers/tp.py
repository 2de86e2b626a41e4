"""PyTorch's side of the mode tp."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import torch.distributed as dist

PLANS = {
    "first": {"first": ColwiseParallel(), "second": RowwiseParallel()},
    "layers": {f"layers.{i}": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)},
    "rotary": {
        "blocks.*.mlp.gate_proj": ColwiseParallel(),
        "blocks.*.mlp.up_proj": ColwiseParallel(),
        "blocks.*.mlp.down_proj": RowwiseParallel(),
    },
    "blocks": {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
}


def parallelise(model):
    children = [name for name, _ in model.named_children()]
    plan = next(plan for child, plan in PLANS.items() if child in children)
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def make_optimizer(model, adamw, **options):
    # The fused kernel takes no mixture of distributed and plain parameters.
    is_mixed = len({isinstance(parameter, DTensor) for parameter in model.parameters()}) > 1
    return adamw(model.parameters(), lr=1e-3, fused=not is_mixed, **options)
