"""Attention of one new token over one layer's codes, beside the fastest ways to write dense attention.

When: `bench.decode_bits` measures it in heads like those of its models.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from transformers import LlamaConfig

from bench.caches import SINKS
from bench.caches import WINDOW as RECENT
from bench.decode_bits_page import BITS, CODED, OURS
from bench.wheel import KINDS
from grace_opt.hf import CapturedAttention, CompressedCache
from grace_opt.hf.bases.basis import Basis
from grace_opt.hf.engine.filling import filled
from grace_opt.hf.stores.coded.in_place import attention_in_place
from grace_opt.kernels._shared.lanes import FEATURES

ROOT = Path(__file__).parent.parent
#: Bytes that no processor's cache holds.
COLD = 2**26
#: Kinds of processors that loops are compiled for, with what torch and MKL call the widest vectors they may use then.
POORER = {"x86-64-v3": ("avx2", "AVX2"), "x86-64-v4": ("avx512", "AVX512")}
_ONE_LAYER = "import json, sys; from bench.decode_bits_layer import one_layer; json.dump(one_layer(*{}), sys.stdout)"
#: How many heads have keys, how many queries, and their width.
Heads = tuple[int, int, int]


def coded_layer(heads: Heads, tokens: int, **kind: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return coded tokens, a query, and the dense tail."""
    kv_heads, query_heads, width = heads
    spread = 4.0 ** -torch.linspace(0, 2, width)
    keys, values = (torch.randn(1, kv_heads, tokens, width) * spread for _ in range(2))
    queries = torch.randn(1, query_heads, RECENT, width) * spread
    config = LlamaConfig(
        hidden_size=query_heads * width,
        num_hidden_layers=1,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=tokens + 1,
    )
    cache = CompressedCache(config, bits=BITS, basis="none", recent_window=RECENT, sink_tokens=SINKS, **kind)
    seen = CapturedAttention(0, queries, keys, values, None, width**-0.5)
    layer = filled(cache, {0: seen}).layers[0]
    turn = torch.linalg.qr(torch.randn(kv_heads, width, width)).Q.contiguous()
    basis = Basis(turn.mT.contiguous(), turn, torch.ones(kv_heads, width))
    # As with a calibrated basis: the step has to multiply by it.
    old = replace(layer.compressed, bases=(basis, basis))
    return old, queries[:, :, -1:], layer.tail.keys, layer.tail.values


def dense_contenders(layers: Sequence[tuple[Tensor, Tensor]], q: Tensor) -> dict[str, Any]:
    """Return the fast ways to write dense attention, by name; each takes the number of a layer."""
    _, kv_heads, _, width = layers[0][0].shape
    grouped = q.view(1, kv_heads, -1, width)
    sdpa, scaling = nn.functional.scaled_dot_product_attention, width**-0.5
    ways: dict[str, Callable[..., Any]] = {
        "eager, grouped": lambda k, v: torch.softmax(grouped @ k.mT * scaling, dim=-1) @ v,
        "sdpa, grouped": lambda k, v: sdpa(grouped, k, v),
        "sdpa, enable_gqa": lambda k, v: sdpa(q, k, v, enable_gqa=True),
    }
    return {name: lambda i, way=way: way(*layers[i]) for name, way in ways.items()}


@torch.inference_mode()
def one_layer(heads: Heads, tokens: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds of each round, of attention alone."""
    torch.manual_seed(0)
    kv_heads, query_heads, width = heads
    module, coded = nn.Identity(), {name: [coded_layer(heads, tokens, **kind)] for name, kind in CODED.items()}
    sizes = coded[OURS][0][0].sizes()
    held = sizes["key codes"] + sizes["value codes"]
    count = -(-COLD // held)
    for name, kind in CODED.items():
        check(coded[name][0])
        coded[name] += [coded_layer(heads, tokens, **kind) for _ in range(count - 1)]
    shape = 1, kv_heads, tokens, width
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(min(count, 5))]
    ways = dense_contenders(layers, torch.randn(1, query_heads, 1, width))

    def ours(number: int, name: str) -> Any:
        old, query, keys, values = coded[name][number % count]
        return attention_in_place(module, query, keys, values, None, old, width**-0.5)

    left, right = torch.randn(2, 256, 256)
    ways |= {name: functools.partial(ours, name=name) for name in CODED}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in track(range(rounds + 1), description=f"one layer, {tokens:,} tokens"):
        for name, run in ways.items():
            taken = 0.0
            for number in range(len(layers)):
                left @ right
                began = time.perf_counter()
                run((turn * len(layers) + number) % count if name in CODED else number)
                taken += time.perf_counter() - began
            if turn:
                times[name].append(1000 * taken / len(layers))
    plain = sum(part.nbytes for part in layers[0])
    return {"tokens": tokens, "ms": times, "dense_bytes": plain, "bytes": held}


def with_less(heads: Heads, tokens: int, rounds: int) -> dict[str, Any]:
    """Return what `one_layer` measures where loops and torch may use less of this processor than it has, by kind."""
    found = {}
    for kind, (widest, name) in POORER.items():
        features = frozenset(f"+{feature}" for feature in KINDS[kind].split())
        if not features < FEATURES:
            continue
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {
                "NUMBA_CPU_NAME": "x86-64",
                "NUMBA_CPU_FEATURES": ",".join(sorted(features)),
                "NUMBA_CACHE_DIR": folder,
                "ATEN_CPU_CAPABILITY": widest,
                "MKL_ENABLE_INSTRUCTIONS": name,
            }
            command = [sys.executable, "-c", _ONE_LAYER.format((heads, tokens, rounds))]
            done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found[kind] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def check(layer: tuple[Any, Tensor, Tensor, Tensor]) -> None:
    """Stop unless reading in place gives what dense copies give."""
    old, query, tail, values = layer
    found = attention_in_place(nn.Identity(), query, tail, values, None, old, query.shape[3] ** -0.5)
    keys, values = old.dense(tail, values)
    expected = nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(1, 2)
    if found is None or not torch.allclose(found[0], expected, atol=1e-5):
        raise SystemExit("reading codes in place gives other numbers than dense copies: nothing is worth timing")
