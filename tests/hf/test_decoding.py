"""A whole model decodes on kernels: the same logits as on zeroed dense keys, and the kernels really ran.

Triton's kernel runs in its interpreter, with the CPU in the part of the GPU.
"""

from __future__ import annotations

import pytest
import torch

from grace_opt.hf import Quantize, SnapKV
from grace_opt.hf.stores.channels import fused as decoding
from grace_opt.hf.stores.packed.tokens import QuantizedTokens
from grace_opt.kernels._shared import dispatch
from grace_opt.kernels._shared.dispatch import use_triton
from grace_opt.kernels.cache import decode as kernels
from grace_opt.kernels.cache.decode.packed import PackedKeys, PackedValues
from grace_opt.kernels.operations import OPERATIONS


@pytest.fixture(params=["compiled", pytest.param("triton", marks=pytest.mark.slow)])
def kernel(request, monkeypatch):
    """How often the kernel was called; every step of every layer that can use it is to."""
    calls = []
    if request.param == "compiled":
        monkeypatch.setattr(kernels, "CPU_MIN_TOKENS", 0)
        monkeypatch.setattr(kernels, "CPU_MIN_TOKENS_IN_FEW_BITS", 0)
        owner, name = kernels.host, "decode_attention"
    else:
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the CPU cannot play the GPU beside one")
        from grace_opt.kernels.cache.decode import gpu as decode
        from tests import interpreter  # noqa: F401  (cheaper launches)

        # Decoding alone: channels are chosen by the references; tests/test_dispatch.py has the kernels for that.
        ours = kernels.OPERATION.gpu
        passed = {(k.name, torch.device("cpu")): k in ours for operation in OPERATIONS for k in operation.gpu}
        for name, value in (("DEVICE_TYPE", "cpu"), ("_verdicts", passed), ("_machines", {}), ("_said", set())):
            monkeypatch.setattr(dispatch, name, value)
        assert use_triton(kernels.DENSE, torch.device("cpu"))
        owner, name = decode, "decode_attention"
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: calls.append(args) or original(*args))
    return calls


@pytest.fixture
def continuation(kernel, continuation, request):
    """Fewer tokens, as the interpreter is slow; enough to fill a block of the tail where there are blocks."""
    interpreted = dispatch.DEVICE_TYPE == "cpu"
    blocks = "tail_block" in request.node.callspec.params.get("changes", {})
    return continuation[:, : 6 if not interpreted else 5 if blocks else 2]


def test_steps_by_kernel_equal_zeroing_by_hand(kernel, family, tiny, prune, padded, continuation, step, zeroed, close):
    model = tiny(family)
    prompt, mask = padded
    cache = prune(model, "mies", 0.5)
    found = step(model, cache, prompt, continuation, mask)
    assert len(kernel) == continuation.shape[1] * model.config.num_hidden_layers
    assert close(found, zeroed(model, cache.channel_mask(), prompt, continuation, mask))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("changes", [{"sink_tokens": 3}, {"evict": SnapKV(20, window=6)}, {"tail_block": 4}], ids=str)
def test_steps_by_kernel_are_the_reference_s(
    kernel, changes, width, tiny, prune, padded, continuation, step, close, monkeypatch
):
    """Tokens out of order, evicted, moved from the tail; with several new tokens the CPU's kernel steps aside."""
    model = tiny()
    found = step(model, prune(model, "mies", 0.5, **changes), padded[0], continuation, padded[1], width=width)
    used = bool(kernel)
    monkeypatch.setattr(decoding, "_by_kernel", lambda *args, **kwargs: None)
    assert close(
        found, step(model, prune(model, "mies", 0.5, **changes), padded[0], continuation, padded[1], width=width)
    )
    assert used == (width == 1 or dispatch.DEVICE_TYPE == "cpu")


@pytest.mark.slow
def test_generation_by_kernel_gives_the_reference_s_tokens(kernel, tiny, prune, padded, generate, monkeypatch):
    model = tiny()
    tokens = 6 if dispatch.DEVICE_TYPE == "cpu" else 16  # the interpreter is slow
    found = generate(model, prune(model, "grace", 0.5), *padded, max_new_tokens=tokens)
    assert len(kernel) == (tokens - 1) * model.config.num_hidden_layers
    monkeypatch.setattr(decoding, "_by_kernel", lambda *args, **kwargs: None)
    assert torch.equal(found, generate(model, prune(model, "grace", 0.5), *padded, max_new_tokens=tokens))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "changes"),
    [
        (Quantize(keys=4, group_size=8), {"sink_tokens": 3}),
        (Quantize(keys=2, values=4, group_size=4), {"tail_block": 4}),
        (Quantize(keys=8, values=8, group_size=8, backend="hqq"), {"evict": SnapKV(24, window=6)}),
        (Quantize(keys=3, values=3, group_size=8, backend="hqq"), {}),
    ],
    ids=str,
)
def test_quantised_keys_are_read_where_they_lie(
    kernel, quantize, changes, tiny, prune, padded, continuation, step, close, monkeypatch
):
    pytest.importorskip("optimum.quanto" if quantize.backend == "quanto" else "hqq")
    monkeypatch.setitem(dispatch._verdicts, ("decoding", torch.device("cpu")), False)  # its trial is another one's
    model, (prompt, mask), changes = tiny(), padded, {"quantize": quantize, **changes}
    found = step(model, prune(model, "mies", 0.5, **changes), prompt, continuation, mask)
    assert len(kernel) == continuation.shape[1] * model.config.num_hidden_layers
    assert all(isinstance(arguments[1], PackedKeys) for arguments in kernel)
    assert all(isinstance(arguments[5], PackedValues) == (quantize.values is not None) for arguments in kernel)
    monkeypatch.setattr(decoding, "_by_kernel", lambda *args, **kwargs: None)
    assert close(found, step(model, prune(model, "mies", 0.5, **changes), prompt, continuation, mask))


def test_where_the_kernel_can_not_go(kernel, tiny, prune, padded, continuation, step, monkeypatch):
    """Blocks that it does not read, weights that are asked for: the reference does it, without a word."""
    pytest.importorskip("hqq")
    model, (prompt, mask) = tiny(), padded
    with monkeypatch.context() as patch:
        patch.setattr(QuantizedTokens, "packed", None)  # as where their lengths or types differ
        quantize = Quantize(keys=3, group_size=8, backend="hqq")
        step(model, prune(model, "mies", 0.5, quantize=quantize), prompt, continuation, mask)
    model.set_attn_implementation("grace_eager")
    hooks = [layer.self_attn.register_forward_hook(lambda *call: None) for layer in model.model.layers]
    step(model, prune(model, "mies", 0.5), prompt, continuation, mask)
    assert not kernel
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        model(prompt, output_attentions=True)  # transformers leaves hooks of its own
    step(model, prune(model, "mies", 0.5), prompt, continuation, mask)  # now nobody reads them
    assert len(kernel) == continuation.shape[1] * model.config.num_hidden_layers
    kernel.clear()
    model.set_attn_implementation("grace_sdpa")
