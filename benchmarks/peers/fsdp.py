"""PyTorch's side of the mode fully_shard: FSDP2, the units that train_modes.cpp makes."""

import torch.distributed as dist
from plain import make_optimizer as make_optimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def units(model):
    for name, child in model.named_children():
        if name in ("first", "second"):
            yield child
        elif name in ("layers", "blocks"):
            yield from child


def parallelise(model):
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)
