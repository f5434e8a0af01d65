"""When Triton's kernels do the work, what happens where they cannot, and that nothing waits for the device.

Here the CPU plays the GPU: ``DEVICE_TYPE`` is set to it and Triton's interpreter does the rest.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from grace_opt import MaskProvider, solve
from grace_opt._util.quiet import quietly as quiet_block
from grace_opt.attention import interaction_matrix
from grace_opt.attention.masks import ChannelMask
from grace_opt.errors import CacheError
from grace_opt.hf.stores.channels.attention import pruned_attention
from grace_opt.hf.stores.channels.kept import kept_channels
from grace_opt.hf.stores.channels.storage import Compressed
from grace_opt.kernels._shared import compiling, dispatch
from grace_opt.kernels._shared.operation import Triton
from grace_opt.kernels.cache.gather import gather_channels
from grace_opt.kernels.operations import OPERATIONS
from grace_opt.kernels.solve.greedy import KERNEL as MIES
from grace_opt.testing import instance

triton = pytest.importorskip("triton")
from grace_opt.kernels.cache.coded import gpu as coded  # noqa: E402
from grace_opt.kernels.cache.coding import gpu as coding  # noqa: E402
from grace_opt.kernels.cache.decode import gpu as decode  # noqa: E402
from grace_opt.kernels.cache.gather import gpu as gather  # noqa: E402
from grace_opt.kernels.solve.exchange import gpu as exchange  # noqa: E402
from grace_opt.kernels.solve.greedy import gpu as greedy  # noqa: E402
from grace_opt.kernels.solve.interaction import gpu as interaction  # noqa: E402
from tests import interpreter  # noqa: E402, F401  (cheaper launches)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU cannot play the GPU beside one")
CPU = torch.device("cpu")
KERNELS = {kernel.name: kernel for operation in OPERATIONS for kernel in operation.gpu}


@pytest.fixture(autouse=True)
def as_at_the_start(monkeypatch):
    for name, empty in (("_machines", {}), ("_verdicts", {}), ("_said", set())):
        monkeypatch.setattr(dispatch, name, empty)


@pytest.fixture
def on_triton(monkeypatch):
    """The CPU is the device of Triton's kernels, whose trials are taken as passed."""
    monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(dispatch, "_verdicts", {(name, CPU): True for name in KERNELS})


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel was launched."""
    found = []
    for module, name in (
        (greedy, "greedy_order"),
        (exchange, "swap_refine"),
        (interaction, "interaction_matrix"),
        (gather, "gather_channels"),
    ):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _f=original, _n=name, **kw: (found.append(_n), _f(*a, **kw))[1])
    return found


def batch(n, dtype=torch.float32):
    return torch.stack([torch.from_numpy(instance("attention", n, seed)) for seed in range(3)]).to(dtype)


def quietly(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


@pytest.mark.parametrize(("method", "kernels"), [("mies", 1), ("local_search", 2), ("beam", 1)])
def test_the_same_choices_by_kernel(method, kernels, on_triton, calls, monkeypatch):
    W = batch(20, torch.float64)
    there = quietly(lambda: solve(W, 9, method, protected=[3]))
    assert len(calls) == kernels
    monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cuda")
    here = solve(W, 9, method, protected=[3])
    assert torch.equal(there.mask, here.mask)
    assert len(calls) == kernels


@pytest.mark.slow
@pytest.mark.parametrize("leading", [(), (2,), (2, 2)])
def test_the_same_weights_by_kernel(leading, on_triton, calls, monkeypatch):
    g = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(*leading, 4, 6, 24, generator=g), torch.randn(*leading, 2, 90, 24, generator=g)
    valid = torch.rand(*leading, 90, generator=g) < 0.8
    for mask in (None, valid):
        found = quietly(lambda mask=mask: interaction_matrix(queries, keys, mask))
        monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cuda")
        expected = interaction_matrix(queries, keys, mask)
        monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cpu")
        assert found.shape == expected.shape == (*leading, 2, 24, 24)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert calls == ["interaction_matrix"] * 2


@pytest.mark.slow
def test_the_same_channels_by_kernel(on_triton, calls):
    g = torch.Generator().manual_seed(0)
    for shape, count in (
        ((2, 3, 50, 24), 7),
        ((1, 1, 1, 5), 5),
        ((2, 1, 0, 8), 3),
        ((1, 2, 9, 8), 0),
        ((1, 1, 70, 300), 257),
    ):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            # Every second number of a longer buffer, heads before tokens: nothing lies side by side.
            keys = (
                torch.randn(*shape[:1], *shape[2:0:-1], 2 * shape[3], generator=g).to(dtype)[..., ::2].transpose(1, 2)
            )
            kept = torch.rand(shape[0], shape[1], shape[3], generator=g).argsort(-1)[..., :count].sort(-1).values
            expected = keys.gather(-1, kept[:, :, None].expand(-1, -1, shape[2], -1))
            assert torch.equal(quietly(lambda keys=keys, kept=kept: gather_channels(keys, kept)), expected)
            across = gather.gather_channels(keys, kept, channel_major=True)
            assert torch.equal(across, expected)
            assert across.mT.is_contiguous()
    assert set(calls) == {"gather_channels"}
    for keys, kept in (
        (torch.ones(2, 2, 4, 8), torch.zeros(2, 3, 1).long()),
        (torch.ones(1, 1, 4, 8), torch.ones(1, 1, 2)),
    ):
        with pytest.raises(CacheError, match="give "):
            gather.gather_channels(keys, kept)


class TestFallback:
    """One warning that says why, and the reference's answer."""

    def answers(self, monkeypatch, W=None, method="mies", why=""):
        W = batch(12) if W is None else W
        with pytest.warns(UserWarning, match=why):
            found = solve(W, 5, method)
        quietly(lambda: solve(W, 5, method))
        monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cuda")
        assert torch.equal(found.mask, solve(W, 5, method).mask)

    def test_without_triton(self, monkeypatch, calls):
        monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cpu")
        monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
        self.answers(monkeypatch, why=r'triton is not installed: pip install "\.\[gpu\]" in the checkout of grace_opt')
        assert not calls

    @pytest.mark.parametrize(("wrong", "why"), [(lambda d: False, "differed"), (lambda d: 1 // 0, "ZeroDivisionError")])
    def test_a_trial_that_fails(self, wrong, why, monkeypatch, calls):
        monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cpu")
        monkeypatch.setattr("grace_opt.kernels.solve.greedy.trial.gpu", wrong)
        self.answers(monkeypatch, why=f"trial on cpu.*{why}")
        assert not calls

    def test_too_large(self, on_triton, monkeypatch, calls):
        self.answers(monkeypatch, torch.randn(2, 257, 257).tril().matmul(torch.eye(257)) * 0, why="larger than 256")
        assert not calls

    def test_heads_too_wide_or_float64(self, on_triton, calls):
        for inputs, why in (
            (torch.ones(1, 4, 257), "heads are wider than 256"),
            (torch.ones(1, 4, 8, dtype=torch.float64), "float32, and the inputs are float64"),
        ):
            with pytest.warns(UserWarning, match=why):
                interaction_matrix(inputs, inputs)
        assert not calls

    def test_limits_of_steps_or_time(self, on_triton, calls):
        with pytest.warns(UserWarning, match="cannot stop at a limit of steps or time"):
            solve(batch(12), 5, "local_search", max_steps=3)
        assert calls == ["greedy_order"]


def test_an_old_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GeForce GTX 1080")
    with pytest.warns(UserWarning, match=r"GeForce GTX 1080 has compute capability 6.1, and Triton needs 8.0"):
        assert not dispatch.use_triton(MIES, torch.device("cuda", 0))


@pytest.mark.slow
def test_a_line_says_that_kernels_are_compiled(monkeypatch, capsys, clock):
    """Once, whatever the number of kernels; and none where that takes no time, or progress=False asks for none."""
    monkeypatch.setattr(compiling.threading, "Timer", clock.timer)
    monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(compiling, "SECONDS_BEFORE_LINE", 0.2)
    monkeypatch.setattr(dispatch, "KERNELS", compiling.Announced(compiling.GPU_LINE))
    said = []
    for name, seconds, quiet in (("a", 0.0, False), ("b", 0.3, True), ("c", 0.3, False), ("d", 0.3, False)):
        slow = Triton(name, "always", lambda device, seconds=seconds: clock.sleep(seconds) is None)
        with quiet_block() if quiet else nullcontext():
            assert dispatch.use_triton(slow, CPU)
            assert dispatch.use_triton(slow, CPU)
        said.append(capsys.readouterr().err)
    assert said == ["", "", f"{compiling.GPU_LINE}\n", ""]


def test_a_kernel_is_not_tried_while_a_graph_is_captured(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr("grace_opt.kernels.solve.greedy.trial.gpu", lambda device: True)
    assert not dispatch.use_triton(MIES, cuda)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert dispatch.use_triton(MIES, cuda)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert dispatch.use_triton(MIES, cuda)


def test_the_environment_turns_kernels_off(on_triton, switch, calls):
    switch("GRACE_OPT_TRITON", "0")
    quietly(lambda: solve(batch(12), 5))
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_trials_pass(kernel):
    assert KERNELS[kernel].trial(CPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "module", "name", "spoil"),
    [
        ("mies", greedy, "greedy_order", lambda taken: taken._replace(order=taken.order.flip(-1))),
        ("exchanges", exchange, "swap_refine", lambda mask: mask.flip(-1)),
        ("gather", gather, "gather_channels", lambda narrow: narrow.flip(-1)),
        ("codes of a trellis", coding, "searched", lambda codes: codes.flip(-1)),
        ("weights", interaction, "interaction_matrix", lambda W: W * 1.0001),
        ("decoding", decode, "decode_attention", lambda output: output * 1.01),
        ("decoding in few bits", decode, "decode_attention", lambda output: output * 1.01),
        ("decoding on coded tokens", coded, "coded_attention", lambda found: (found[0] * 1.01, found[1])),
        ("decoding on coded tokens", coded, "coded_attention", lambda found: (found[0], found[1] * 1.01)),
    ],
)
def test_trials_notice(kernel, module, name, spoil, monkeypatch):
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **kw: spoil(original(*a, **kw)))
    assert not KERNELS[kernel].trial(CPU)


@pytest.mark.slow
def test_trial_notices_a_trellis_that_is_read_as_it_is_stored(monkeypatch):
    original = coded.coded_attention
    monkeypatch.setattr(coded, "coded_attention", lambda *a, **kw: original(*a, **{**kw, "trellis": False}))
    assert not KERNELS["decoding on coded tokens"].trial(CPU)


class TestNothingWaits:
    """Tensors without numbers on a device that is not the CPU: whoever asks for a number raises."""

    DEVICE = "lazy"

    @pytest.fixture(autouse=True)
    def no_numbers(self):
        with FakeTensorMode():
            yield

    def tensor(self, *shape, **kwargs):
        return torch.empty(*shape, device=self.DEVICE, **kwargs)

    def test_asking_for_a_number_would_be_noticed(self):
        with pytest.raises(DataDependentOutputException):
            bool((self.tensor(3) < 0).any())

    @pytest.mark.parametrize("method", ["mies", "think"])
    def test_solvers(self, method):
        problem = MaskProvider(method, 0.5).problem(self.tensor(1, 4, 8, 16), self.tensor(1, 2, 30, 16))
        assert MaskProvider(method, 0.5).choose(problem).pruned.device.type == self.DEVICE

    @pytest.mark.parametrize("method", ["grace", "mies", "think"])
    def test_from_keys_to_what_is_stored(self, method):
        queries, keys = self.tensor(2, 4, 8, 16, dtype=torch.float16), self.tensor(2, 2, 30, 16, dtype=torch.float16)
        valid = self.tensor(2, 30, dtype=torch.bool)
        for mask in (None, valid):
            chosen = MaskProvider(method, 0.6)(queries, keys, mask)
            assert kept_channels(chosen, keys).shape == (2, 2, 6)

    def test_a_mask_of_unknown_size_has_to_wait(self):
        with pytest.raises(DataDependentOutputException):
            kept_channels(ChannelMask(self.tensor(2, 2, 16, dtype=torch.bool)), self.tensor(2, 2, 30, 16))

    @pytest.mark.parametrize("mask", [None, torch.bool, torch.float16])
    def test_decoding(self, mask):
        half = {"dtype": torch.float16}
        stored = Compressed(
            30,
            self.tensor(2, 2, 2, 16, **half),
            self.tensor(2, 2, 28, 6, **half),
            self.tensor(2, 2, 6, dtype=torch.int64),
            self.tensor(2, 2, 30, 16, **half),
        )
        query, tail, values = (self.tensor(2, heads, tokens, 16, **half) for heads, tokens in ((4, 1), (2, 5), (2, 5)))
        shown = None if mask is None else self.tensor(2, 1, 1, 35, dtype=mask)
        output, _ = pruned_attention(torch.nn.Identity(), query, tail, values, shown, stored)
        assert output.shape == (2, 1, 4, 16)
