"""The same answers on a CUDA device as on the CPU, and results that stay there."""

import pytest
import torch

from grace_opt import MaskProvider, methods, solve
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
