"""Check that the compiled loops agree with the reference on a small case: outputs, numbers of tokens, and bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.cases import draw
from ..coded.forms import WIDTHS
from ..coded.table import CodedSequence, table_of, units_of
from ..coded.trial import COUNTS, codes
from ..coding.reference import pack_bits
from ..reading import Stored, TokenRanges, reference
from .host import few_coded_attention
from .table import Lying

_CHANGES = (
    lambda code, width: code,
    lambda code, width: code >> width // 2 << width // 2,
    lambda code, width: code | (1 << width // 2) - 1,
)


def cpu() -> bool:
    """Compare tokens and pages, with and without conditions to read on."""
    device = torch.device("cpu")
    books = torch.zeros(9, 256, dtype=torch.float32, device=device)
    for width in WIDTHS[1:]:
        books[width, : 2**width] = torch.linspace(-2, 2, 2**width, dtype=torch.float32, device=device)
    count = sum(COUNTS)
    labels = torch.repeat_interleave(
        torch.arange(3, device=device), torch.tensor(COUNTS, dtype=torch.int64, device=device)
    )
    places = torch.arange(count, device=device)
    classes = torch.stack([labels[places * 37 % count], labels[places * 61 % count]]).to(torch.uint8)
    coded_at = classes.argsort(dim=-1, stable=True).argsort(dim=-1)[..., None].expand(2, count, 20)

    def ordered(tensor: Tensor) -> Tensor:
        return tensor.gather(1, coded_at)

    (keys, _), (values, dense_values) = codes(device, books, 0), codes(device, books, 1)
    dense, lower, upper = (ordered(codes(device, books, 0, change)[1])[None] for change in _CHANGES)
    query, bases = draw(device, 1, 4, 1, 20), draw(device, 2, 2, 20, 20)
    sinks, tails = draw(device, 2, 2, 3, 20), draw(device, 2, 1, 2, 9, 20)
    table = table_of([units_of(keys, values, 2)], 2)
    sequence = CodedSequence(table, sinks[0], sinks[1], bases[0], bases[1])
    bits = pack_bits(torch.stack([classes & 1, classes >> 1]))
    lying = Lying.of(table, 2, [bits], [COUNTS])
    old = torch.cat([sinks[1], (ordered(dense_values) @ bases[1].double()).float()], dim=1)[None]
    kept = torch.arange(20, device=device).expand(1, 2, 20)
    stored = Stored(dense, kept, sinks[0][None], tails[0], old, tails[1])
    for size, least, epsilon, top_p in ((1, 30, None, None), (8, 4, None, None), (1, 9, 0.3, None), (1, 9, None, 0.7)):
        units = TokenRanges.of(lower, upper, size)
        found = few_coded_attention(
            query, [sequence], [lying], tails[0], tails[1], books, 9, [0], [least], size, epsilon, top_p
        )
        expected = reference.attention(
            query,
            stored,
            units,
            torch.tensor([least], dtype=torch.int64, device=device),
            least,
            epsilon,
            top_p,
            basis=bases[0][None],
        )
        near = torch.allclose(found.output, expected.output, rtol=0, atol=1e-5 * float(old.abs().max()))
        if not near or not torch.equal(found.tokens, expected.tokens):
            return False
        if not torch.allclose(found.bound, expected.bound, rtol=2e-2, atol=1e-6):
            return False
    return True
