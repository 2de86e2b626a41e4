"""The jobs of jobs.cpp, module by module in the same order: equal seeds give equal weights and equal batches."""

import torch
from torch import nn
from torch.nn import functional as F

WEIGHT_SEED = 1
BATCH_SEED = 1000  # plus the rank


class Mlp(nn.Module):
    BATCH = 32

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(50, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x):
        return torch.sigmoid(self.second(torch.sigmoid(self.first(x))))


class Net2000(nn.Module):
    BATCH = 16

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2000, 2000) for _ in range(4))

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(F.gelu(x))
        return x


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):  # [batch, context, width]
        batch, context, width = x.shape
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, context, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    BATCH, CONTEXT, VOCABULARY, WIDTH, HEADS, BLOCKS = 4, 128, 256, 256, 4, 6

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.CONTEXT, self.WIDTH)
        self.blocks = nn.ModuleList(Block(self.WIDTH, self.HEADS) for _ in range(self.BLOCKS))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)

    def forward(self, ids):  # [batch, context] -> [batch, context, vocabulary]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp_batch():
    return torch.rand(Mlp.BATCH, 50), torch.rand(Mlp.BATCH, 8)


def net2000_batch():
    return torch.randn(Net2000.BATCH, 2000), torch.randn(Net2000.BATCH, 2000)


def gpt_batch():
    ids = torch.randint(Gpt.VOCABULARY, (Gpt.BATCH, Gpt.CONTEXT + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def token_loss(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


# name: (model, batch, loss)
JOBS = {
    "mlp": (Mlp, mlp_batch, F.mse_loss),
    "net2000": (Net2000, net2000_batch, F.mse_loss),
    "gpt": (Gpt, gpt_batch, token_loss),
}


class Job:
    """A model with its loss and this rank's batch; the weights are the same on every rank."""

    def __init__(self, name, rank):
        make_model, make_batch, self.loss_of = JOBS[name]
        torch.manual_seed(WEIGHT_SEED)
        self.model = make_model()
        torch.manual_seed(BATCH_SEED + rank)
        self.input, self.target = make_batch()
