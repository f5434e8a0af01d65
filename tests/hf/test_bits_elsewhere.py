"""Prompts coded on another device than the CPU: what the host asks of it, and that it gives the same codes."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from grace_opt.hf import CapturedAttention, CompressedCache
from grace_opt.hf.engine.filling import filled
from grace_opt.hf.stores.coded import heads as bits_heads
from grace_opt.hf.stores.coded.parts import Received
from grace_opt.hf.stores.tail import Tail
from grace_opt.kernels import steps
from grace_opt.kernels.cache import coding, received
from tests.elsewhere import elsewhere, here, watched

HEADS, GROUP, WIDTH = 2, 2, 32
#: Operations that coding a layer may ask for: at some 10 µs each, 32 layers take less than a fifth of a second.
MOST = 600
#: With a trellis so many more: some for each class of keys and of values.
MOST_OF_TRELLIS = MOST + 40
#: What a further sequence of the same length may ask for: its queries and its classes are its own, its codes are not.
MOST_OF_A_ROW = 150
#: Are its numbers finite, which places are padding, where are the queries, and what would no bits at all cost.
WAITS = 4


@pytest.fixture(autouse=True)
def step_by_step(monkeypatch):
    """The CPU's loops are compiled: here its steps are those of other devices."""
    for module in (coding, received, steps):
        monkeypatch.setattr(module, "worth_compiling", lambda numbers: False)
    monkeypatch.setattr(bits_heads, "is_compiled", lambda *tensors: False)


def prompt(rows, tokens, padding=0):
    """Queries, keys, values, and which tokens of the second sequence are not padding."""
    g = torch.Generator().manual_seed(rows * tokens)
    spread = 4.0 ** -torch.linspace(0, 2, WIDTH)
    queries, keys, values = (
        torch.randn(rows, heads, tokens, WIDTH, generator=g) * spread for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    valid = torch.ones(rows, tokens, dtype=torch.bool)
    valid[1:, :padding] = False
    return queries, keys, values, valid if padding else None


def coded(parts, move=lambda tensor: tensor, **settings):
    """The layer of a cache that has read them; without a trellis unless asked for, whose steps are many in torch."""
    config = LlamaConfig(
        hidden_size=HEADS * GROUP * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
    )
    settings = {"bits": 2.25, "basis": "none", "recent_window": 32, "trellis": False, **settings}
    queries, keys, values, valid = (move(each) for each in parts)
    seen = CapturedAttention(0, queries, keys, values, valid, WIDTH**-0.5)
    return filled(CompressedCache(config, **settings), {0: seen}).layers[0]


def check_same(found, expected):
    """Equal but for sums in another order."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = here(found[name])
        assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype), name
        assert (other != tensor).double().mean() < 2e-3, name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"evict": "snapkv"},
        {"bits": None, "total_bytes": 2**17},
        {"bits": None, "key_bits": 4, "value_bits": 2},
        {"trellis": True},
    ],
    ids=["none", "evict", "bytes", "apart", "trellis"],
)
@pytest.mark.parametrize("padding", [0, 75])
def test_codes_are_those_of_the_cpu(settings, padding):
    """With sequences of one length, which are coded together, and of several."""
    parts = prompt(3, 700, padding)
    with watched():
        found = coded(parts, elsewhere, **settings).compressed.parts()
    check_same(found, coded(parts, **settings).compressed.parts())


def test_a_sequence_is_coded_as_it_is_alone():
    parts = prompt(3, 500)
    with watched():
        (together,) = (coded(parts, elsewhere).compressed.rows,)
        for number, row in enumerate(together):
            own = [None if each is None else each[number : number + 1].clone() for each in parts]
            alone = coded(own, elsewhere).compressed.rows[0]
            for name, tensor in alone.tensors().items():
                assert torch.equal(here(row.tensors()[name]), here(tensor)), name


def test_a_sequence_that_leaves_the_batch_keeps_no_other_in_memory():
    """Codes that were made together are copies."""
    with watched():
        for row in coded(prompt(3, 500), elsewhere).compressed.rows:
            for name, tensor in row.tensors().items():
                assert here(tensor).untyped_storage().nbytes() == here(tensor).nbytes, name


@pytest.mark.parametrize("trellis", [False, True])
@pytest.mark.parametrize("padding", [0, 75])
def test_few_operations_and_waits(padding, trellis, monkeypatch):
    """Each has to be started by the host, and for each wait the device has nothing to do."""
    # On a GPU a kernel searches the codes of a trellis.
    monkeypatch.setattr(coding, "searched", lambda scaled, levels, bits: scaled.to(torch.uint8))
    found = []
    for rows in (1, 5):
        coded(prompt(rows, 700, padding), trellis=trellis)  # codebooks are made once per process
        with watched() as watch:
            coded(prompt(rows, 700, padding), elsewhere, trellis=trellis)
        found.append(watch.operations.total())
        assert watch.waits.total() <= WAITS
        assert {*watch.copies} <= {"to_device", "codebooks", "<genexpr>"}
    assert found[0] <= (MOST_OF_TRELLIS if trellis else MOST)
    assert padding or found[1] - found[0] <= 4 * MOST_OF_A_ROW


def test_operations_do_not_grow_with_heads_or_tokens(monkeypatch):
    """Unless there are too many numbers at once."""
    counts = []
    for tokens in (700, 1400):
        with watched() as watch:
            coded(prompt(1, tokens), elsewhere)
        counts.append(watch.operations.total())
    assert counts[1] <= counts[0] + 5
    monkeypatch.setattr(bits_heads, "MAX_NUMBERS_ELSEWHERE", 1)
    with watched() as watch:
        few = coded(prompt(1, 700), elsewhere).compressed.parts()
    assert watch.operations.total() > 2 * counts[0]
    assert watch.waits.total() <= WAITS
    check_same(few, coded(prompt(1, 700)).compressed.parts())


def test_newer_tokens_are_coded_without_waiting():
    with watched():
        layer = coded(prompt(2, 500, 75), elsewhere)
        tokens = layer.compressed
    g = torch.Generator().manual_seed(3)
    with watched() as watch:
        for _ in range(2):
            block = Tail(*(elsewhere(torch.randn(2, HEADS, 64, WIDTH, generator=g)) for _ in range(2)))
            tokens = tokens.extended(layer.plan, block)
    assert not watch.waits
    assert {*watch.copies} == {"to_device"}


def test_sums_of_attention_that_were_offloaded_are_added_where_the_step_is():
    sums = Received(torch.ones(1, 2, 3, 4))
    with watched() as watch:
        sums.add(elsewhere(torch.ones(1, 2, 3, 5)))
    assert not watch.waits
    assert here(sums.sums)[0, 0, 0].tolist() == [2, 2, 2, 2, 1]
