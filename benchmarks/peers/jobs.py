"""The jobs of jobs.cpp, module by module in the same order: equal seeds give equal weights and equal batches."""

import dataclasses

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


@dataclasses.dataclass
class GptShape:
    blocks: int = 6
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 4
    vocabulary: int = 256
    is_tied: bool = False


class Gpt(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        if shape.is_tied:
            nn.init.normal_(self.tokens.weight, 0, 0.02)
            self.head = None
        else:
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids):  # [batch, context] -> [batch, context, vocabulary]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if self.head is not None else F.linear(x, self.tokens.weight)


class Rotary(nn.Module):
    def __init__(self, head_dim, positions, base):
        super().__init__()
        angles = torch.outer(torch.arange(positions), 1 / base ** (torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):  # [batch, heads, context, head_dim]
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.head_dim = shape.width // shape.heads
        self.q_proj = nn.Linear(shape.width, shape.heads * self.head_dim)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * self.head_dim)
        self.o_proj = nn.Linear(shape.heads * self.head_dim, shape.width, bias=False)

    def forward(self, x, rotary):  # [batch, context, width]
        projected = (each(x) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected)
        attended = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class QwenBlock(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=1e-6)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=1e-6)
        self.mlp = SwiGLU(shape)

    def forward(self, x, rotary):
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclasses.dataclass
class QwenShape:
    blocks: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    batch: int
    vocabulary: int


class Qwen(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.rotary = Rotary(shape.width // shape.heads, shape.context, base=1e6)
        self.blocks = nn.ModuleList(QwenBlock(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        nn.init.normal_(self.tokens.weight, 0, 0.02)

    def forward(self, ids):  # [batch, context] -> [batch, context, vocabulary]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.rotary)
        return F.linear(self.norm(x), self.tokens.weight)


def mlp_batch():
    return torch.rand(Mlp.BATCH, 50), torch.rand(Mlp.BATCH, 8)


def net2000_batch():
    return torch.randn(Net2000.BATCH, 2000), torch.randn(Net2000.BATCH, 2000)


def token_batch(shape):
    ids = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def token_loss(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def gpt(**shape):
    shape = GptShape(**shape)
    return (lambda: Gpt(shape), lambda: token_batch(shape), token_loss)


def qwen(**shape):
    shape = QwenShape(**shape)
    return (lambda: Qwen(shape), lambda: token_batch(shape), token_loss)


GPT2_SMALL = {"blocks": 12, "width": 768, "heads": 12, "context": 1024, "batch": 16}
QWEN_HALF_BILLION = {  # Qwen2.5-0.5B's
    "blocks": 24,
    "width": 896,
    "heads": 14,
    "kv_heads": 2,
    "hidden": 4864,
    "context": 2048,
    "batch": 8,
    "vocabulary": 151936,
}
SMALL_QWEN = {
    "blocks": 2,
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 176,
    "context": 64,
    "batch": 2,
    "vocabulary": 512,
}
MLP = (Mlp, mlp_batch, F.mse_loss)
# device: name: (model, batch, loss)
JOBS = {
    "cpu": {
        "mlp": MLP,
        "net2000": (Net2000, net2000_batch, F.mse_loss),
        "gpt": gpt(),
        "qwen": qwen(**SMALL_QWEN),
    },
    "cuda": {
        "mlp": MLP,
        "gpt": gpt(context=256, batch=8),
        "gpt12x768": gpt(**GPT2_SMALL),
        "gpt2": gpt(**GPT2_SMALL, vocabulary=50304, is_tied=True),
        "qwen": qwen(**QWEN_HALF_BILLION),
    },
}


class Job:
    """A model with its loss and this rank's batch; the weights are the same on every rank and device."""

    def __init__(self, name, rank, device):
        make_model, make_batch, self.loss_of = JOBS[device.type][name]
        torch.manual_seed(WEIGHT_SEED)
        self.model = make_model().to(device)
        torch.manual_seed(BATCH_SEED + rank)
        self.input, self.target = (each.to(device) for each in make_batch())
