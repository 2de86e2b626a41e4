"""PyTorch's side of the mode replicate."""

from torch.nn.parallel import DistributedDataParallel


def parallelise(model):
    return DistributedDataParallel(model)


def make_optimizer(model, adamw):
    return adamw(model.parameters(), lr=1e-3, fused=True)
