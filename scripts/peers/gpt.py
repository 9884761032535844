"""A Llama-shaped model in plain PyTorch, of exactly our shape, and what the measurements share."""

import argparse
import json
import math
import os
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def arguments(description):
    """A parser with the model's shape and the batch; the defaults are our reference model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--inner", type=int, default=1024, help="width of the feed-forward's inside")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--tied", action="store_true", help="the head's projection is the embedding")
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--sequences", type=int, default=32, help="sequences a step, all processes together")
    parser.add_argument("--steps", type=int, default=6, help="steps measured, after two that are not")
    return parser


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, self.kv_heads * self.size, bias=False)
        self.v = nn.Linear(shape.width, self.kv_heads * self.size, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x, cosine, sine):
        sequences, length, width = x.shape
        split = lambda t, heads: t.view(sequences, length, heads, self.size).transpose(1, 2)
        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.kv_heads), split(self.v(x), self.kv_heads)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o(y.transpose(1, 2).reshape(sequences, length, width))


def rotate(x, cosine, sine):
    half = x.shape[-1] // 2
    return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.width, eps=1e-5), nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x, cosine, sine):
        x = x + self.attention(self.norm1(x), cosine, sine)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stage(nn.Module):
    """Layers `first..last`, with the embedding before the first layer and the head after the last."""

    def __init__(self, shape, first=0, last=None):
        super().__init__()
        last = shape.layers if last is None else last
        self.begins, self.ends = first == 0, last == shape.layers
        if self.begins:
            self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(first, last))
        if self.ends:
            self.norm = nn.RMSNorm(shape.width, eps=1e-5)
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        size = shape.width // shape.heads
        angles = torch.outer(torch.arange(shape.length), 10_000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x):
        if self.begins:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.head(self.norm(x)) if self.ends else x


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def batch_of(shape, sequences, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, shape.vocab, (sequences, shape.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def timed(step, count, warm_up=2):
    """Runs `step` and returns the median of its seconds after the warm-up."""
    seconds = []
    for _ in range(warm_up + count):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[warm_up:])


def report(name, shape, seconds, **more):
    """Prints the one line of JSON."""
    tokens = shape.sequences * shape.length
    parameters = sum(p.numel() for p in Stage(shape).parameters())
    figures = {"name": name, "tokens_per_second": round(tokens / seconds, 1), "step_seconds": round(seconds, 4), "tokens_per_step": tokens, "parameters": parameters}
    print(json.dumps(figures | more), flush=True)


def start_process(rank, processes, port):
    """One process of several: one thread, gloo."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=processes)


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def divisors(number, most=math.inf):
    return [n for n in range(1, number + 1) if number % n == 0 and n <= most]
