"""What the programs here have in common, each of which is one rank that runs our distributed tensors through libtessera.

PROGRAM LIBRARY RANK WORLD_SIZE INIT_METHOD, then arguments of its own.
"""

import argparse
import sys
import types
import unittest
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
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return parser


def load_op_db():
    """PyTorch's operator database. Of expecttest, which its module imports, it needs a base class alone."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def join(options):
    """Loads the library and meets the other ranks. One thread each: the ranks share the cores."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.init()
        # What is compared is computed in other shapes, so with other rounding.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    torch.ops.load_library(options.library)
    timeout = 60 if options.device == "cuda" else 20  # kernels are loaded at their first use
    torch.ops.tessera_test.init(options.init_method, options.rank, options.world_size, timeout)


def tensors_of(values):
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def counts_line(counts):
    return " ".join(f"{name} {count}" for name, count in counts.items())
