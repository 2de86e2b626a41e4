"""The peer jax: a whole step (forward, backward, AdamW) as one jitted function, from the weights of jobs.py.

One process on the CPU, one thread. Parameters are a flat list in the order of the PyTorch model's, with its names.
"""

import os
import sys
import time

os.environ.setdefault("NPROC", "1")  # of XLA's thread pool
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch  # noqa: E402

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise SystemExit(f"peer jax: expected the package jax in {sys.executable} ({error}); pip install jax") from error

LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2


def linear(weights, name, x):
    y = x @ weights[name + ".weight"].T
    return y + weights[name + ".bias"] if name + ".bias" in weights else y


def layer_norm(weights, name, x):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weights[name + ".weight"] + weights[name + ".bias"]


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def attend(q, k, v):  # [batch, context, heads, features]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    is_past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf)), v)


def block(weights, name, heads, x):
    normed = linear(weights, name + ".qkv", layer_norm(weights, name + ".attention_norm", x))
    q, k, v = (part.reshape(*x.shape[:2], heads, -1) for part in jnp.split(normed, 3, axis=-1))
    x = x + linear(weights, name + ".projection", attend(q, k, v).reshape(x.shape))
    up = linear(weights, name + ".up", layer_norm(weights, name + ".mlp_norm", x))
    return x + linear(weights, name + ".down", gelu(up))


def mlp(_, weights, x):
    return jax.nn.sigmoid(linear(weights, "second", jax.nn.sigmoid(linear(weights, "first", x))))


def net2000(model, weights, x):
    x = linear(weights, "layers.0", x)
    for i in range(1, len(model.layers)):
        x = linear(weights, f"layers.{i}", gelu(x))
    return x


def gpt(model, weights, ids):
    x = weights["tokens.weight"][ids] + weights["positions.weight"][: ids.shape[1]]
    for i, each in enumerate(model.blocks):
        x = block(weights, f"blocks.{i}", each.heads, x)
    return linear(weights, "head", layer_norm(weights, "norm", x))


def mean_square(predicted, target):
    return jnp.square(predicted - target).mean()


def cross_entropy(logits, targets):
    logits = jax.nn.log_softmax(logits.reshape(-1, logits.shape[-1]))
    return -jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1).mean()


FORWARDS = {"mlp": (mlp, mean_square), "net2000": (net2000, mean_square), "gpt": (gpt, cross_entropy)}


def adamw(weight, gradient, mean, square, step):
    mean = BETA1 * mean + (1 - BETA1) * gradient
    square = BETA2 * square + (1 - BETA2) * jnp.square(gradient)
    denominator = jnp.sqrt(square / (1 - BETA2**step)) + EPS
    return weight * (1 - LR * WEIGHT_DECAY) - LR * mean / (1 - BETA1**step) / denominator, mean, square


class Trainer:
    def __init__(self, name, job):
        if name not in FORWARDS:
            raise SystemExit(f"peer jax: expected one of the jobs {', '.join(FORWARDS)}, got {name}")
        forward, loss_of = FORWARDS[name]
        names = [each for each, _ in job.model.named_parameters()]
        weights = [jnp.asarray(each.detach().numpy()) for each in job.model.parameters()]
        batch, target = jnp.asarray(job.input.numpy()), jnp.asarray(job.target.numpy())

        def loss(weights):
            return loss_of(forward(job.model, dict(zip(names, weights)), batch), target)

        def step(weights, means, squares, count):
            value, gradients = jax.value_and_grad(loss)(weights)
            count = count + 1
            updated = [adamw(*each, count) for each in zip(weights, gradients, means, squares)]
            return value, *(list(each) for each in zip(*updated)), count

        self.jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
        zeros = [[jnp.zeros_like(each) for each in weights] for _ in range(2)]
        self.state = (weights, *zeros, jnp.zeros((), jnp.float32))

    def step(self):
        value, *self.state = self.jitted(*self.state)
        return value

    def train(self, steps):
        losses = [float(self.step()) for _ in range(steps)]
        return {"losses": losses, "parameters": [torch.from_dlpack(each) for each in self.state[0]]}

    def time(self, steps):
        for _ in range(steps // 10 + 1):
            self.step()
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        jax.block_until_ready(self.state)
        return {"seconds": time.perf_counter() - start}
