# The training of pytorch_peer_test.cpp by PyTorch's own fully_shard. run_peers gives torch, rank,
# world_size, init_process_group and inputs, and takes outputs.
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


init_process_group(backend="gloo")
number = {name: inputs[name].item() for name in ("width", "mixed", "adam", "accumulate", "max_norm", "reshard")}
torch.manual_seed(42)
model = Net(int(number["width"]))
policy = MixedPrecisionPolicy()
if number["mixed"]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy, reshard_after_forward=bool(number["reshard"]))
fully_shard(model, mp_policy=policy)
if number["adam"]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data, target = inputs["data"], inputs["target"]
accumulate = int(number["accumulate"])
losses, norms = [], []
for step in range(data.shape[0]):
    last = step % accumulate == accumulate - 1
    model.set_requires_gradient_sync(last)
    loss = nn.functional.mse_loss(model(data[step, rank]).float(), target[step, rank])
    loss.backward()
    losses.append(loss.detach())
    if not last:
        continue
    gradients = {f"gradient of {name}": p.grad.full_tensor() for name, p in model.named_parameters()}
    if number["max_norm"]:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), number["max_norm"]).full_tensor())
    optimizer.step()
    optimizer.zero_grad()
outputs["losses"] = torch.stack(losses)
outputs["norms"] = torch.stack(norms) if norms else torch.zeros(0)
outputs.update(gradients)
outputs.update({name: p.detach().full_tensor() for name, p in model.named_parameters()})
