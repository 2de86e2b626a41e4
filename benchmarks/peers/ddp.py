"""PyTorch's side of the mode replicate."""

from plain import make_optimizer as make_optimizer
from torch.nn.parallel import DistributedDataParallel


def parallelise(model):
    return DistributedDataParallel(model)
