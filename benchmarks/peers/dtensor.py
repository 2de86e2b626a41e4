#!/usr/bin/env python3
"""PyTorch's side of `tessera bench dtensor`: prints one line of JSON, row -> [plain_us, dtensor_us].

The rows are those of dtensor.cpp, on tensors of the same sizes and a mesh of one rank.
"""

import json
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def microseconds(call, seconds):
    for _ in range(20):
        call()
    start = time.perf_counter()
    call()
    count = max(3, int(seconds / max(time.perf_counter() - start, 1e-7)))
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


def layers(mesh):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if mesh is not None:
        for layer in (model[0], model[2]):
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return model


def training(x, mesh):
    model = layers(mesh)

    def step():
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def optimizing(x, mesh):
    model = layers(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    model(x).sum().backward()
    return optimizer.step


def rows(mesh):
    plain = torch.ones(8, 8)
    sharded = DTensor.from_local(plain, mesh, [Shard(0)])
    operators = {
        "add": lambda x: x + x,
        "relu": torch.relu,
        "mm": lambda x: x.mm(x),
        "view": lambda x: x.view(8, 2, 4),
        "detach": lambda x: x.detach(),
        "sum": lambda x: x.sum(),
    }
    for name, operator in operators.items():
        yield name, True, lambda f=operator: f(plain), lambda f=operator: f(sharded)
    yield "from_local", False, lambda: None, lambda: DTensor.from_local(plain, mesh, [Shard(0)])
    yield "to_local", False, lambda: None, sharded.to_local
    yield "two layers, forward and backward", False, training(plain, None), training(sharded, mesh)
    yield "Adam step", False, optimizing(plain, None), optimizing(sharded, mesh)


def main():
    torch.set_num_threads(1)
    seconds = float(sys.argv[1])
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        result = {}
        for name, without_grad, plain, sharded in rows(mesh):
            with torch.set_grad_enabled(not without_grad):
                pairs = [(microseconds(plain, seconds), microseconds(sharded, seconds)) for _ in range(5)]
            result[name] = [statistics.median(column) for column in zip(*pairs)]
        print(json.dumps(result))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
