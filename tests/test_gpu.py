"""The same answers on a CUDA device as on the CPU, and results that stay there."""

import warnings

import pytest
import torch

from grace_opt import MaskProvider, methods, solve
from grace_opt.hf.stores.channels.attention import pruned_attention
from grace_opt.hf.stores.channels.fused import fused_attention
from grace_opt.hf.stores.channels.storage import Compressed
from grace_opt.kernels._shared import dispatch
from grace_opt.kernels.cache.gather import gather_channels
from grace_opt.kernels.operations import OPERATIONS
from grace_opt.testing import KINDS, instance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
W = torch.stack([torch.from_numpy(instance(kind, 12, 0)) for kind in KINDS])


@pytest.mark.parametrize("method", [spec.name for spec in methods()])
def test_every_method_agrees_with_the_cpu(method):
    k = torch.arange(len(W)) % 6 + 1
    here = solve(W, k, method, protected=[0, 5], certify=True)
    there = solve(W.cuda(), k.cuda(), method, protected=[0, 5], certify=True)
    assert there.mask.is_cuda
    assert there.objective.is_cuda
    assert torch.equal(there.mask.cpu(), here.mask)
    torch.testing.assert_close(there.lower_bound.cpu(), here.lower_bound, rtol=2e-3, atol=1e-9)
    there.verify()


def test_the_provider_keeps_to_the_device():
    q, k = torch.randn(2, 8, 32, 64), torch.randn(2, 4, 200, 64)
    here = MaskProvider("grace", 0.6)(q, k).pruned
    there = MaskProvider("grace", 0.6)(q.cuda(), k.cuda()).pruned
    assert there.is_cuda
    assert (there.cpu() == here).float().mean() > 0.99  # matrix products round differently


def test_the_kernels_are_used_and_say_nothing():
    device, q, k = W.cuda().device, torch.randn(1, 8, 32, 64), torch.randn(1, 2, 300, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MaskProvider("grace", 0.6)(q.cuda().half(), k.cuda().half())
        solve(W.cuda(), 5, "local_search", check=False)
        gather_channels(k.cuda(), torch.arange(9).expand(1, 2, -1).cuda())
    assert all(dispatch.use_triton(kernel, device) for operation in OPERATIONS for kernel in operation.gpu)


def test_selection_can_be_captured_as_a_graph():
    q, k = torch.randn(2, 8, 32, 64, device="cuda").half(), torch.randn(2, 2, 300, 64, device="cuda").half()
    provider = MaskProvider("grace", 0.6)
    expected = provider(q, k).kept_indices
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = provider(q, k).kept_indices
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("mask", [None, torch.bool])
def test_decoding_can_be_captured_as_a_graph(mask):
    def draw(*shape):
        return torch.randn(*shape, device="cuda").half()

    kept = torch.arange(0, 64, 3, device="cuda").expand(2, 2, -1).contiguous()
    stored = Compressed(300, draw(2, 2, 4, 64), draw(2, 2, 296, 22), kept, draw(2, 2, 300, 64))
    query, tail, values = draw(2, 8, 1, 64), draw(2, 2, 37, 64), draw(2, 2, 37, 64)
    shown = None if mask is None else torch.rand(2, 1, 1, 337, device="cuda") < 0.8
    arguments = (torch.nn.Identity(), query, tail, values, shown, stored)
    expected = pruned_attention(*arguments)[0]
    fused_attention(*arguments, False)  # the kernel's trial
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused_attention(*arguments, False)[0]
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
