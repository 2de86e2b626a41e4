"""What the programs here have in common, each of which is one rank that runs our distributed tensors through libtessera.

PROGRAM LIBRARY RANK WORLD_SIZE INIT_METHOD, then arguments of its own.
"""

import argparse
import warnings

import torch
from torch.utils import _pytree as pytree


def argument_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("init_method")
    parser.add_argument("--only", help="the operator of this name alone")
    return parser


def join(options):
    """Loads the library and meets the other ranks. One thread each: the ranks share the cores."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.ops.load_library(options.library)
    torch.ops.tessera.init(options.init_method, options.rank, options.world_size, 20)


def tensors_of(values):
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def counts_line(counts):
    return " ".join(f"{name} {count}" for name, count in counts.items())
