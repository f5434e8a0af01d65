"""Second moments of one layer over calibration texts: what its bases and its share of the bits are made of.

Texts come one after the other, and only sums stay: d × d numbers per head and class, however many texts there are.
Class by class the sums are kept for texts with equally many classes; sizes are averaged over those.

Sinks and the most recent tokens are left out, as they stay dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...errors import CalibrationError
from ..models.projection import output_energy, value_metric
from ..models.recording import AttentionCall
from ..settings.bits import SINKS
from .basis import Basis, energy_in, joint_basis
from .classes import WINDOW, class_sizes, token_weights
from .expected import directions, expected_sums
from .importance import attention_moments, observed_queries
from .rates import steps
from .rotary import RotaryMean, choose_pairs

#: Of this many neighbouring tokens, one shows how large the layer's output is.
ENERGY_STRIDE = 4


@dataclass
class ClassSums:
    """Sums over texts with equally many classes: sizes ``(C,)``, and weighted squares ``(C, H, d, d)``."""

    texts: int
    sizes: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class LayerMoments:
    """What the calibration texts say about one layer.

    Parameters
    ----------
    layer : int
        Its position in the model, for messages.
    """

    layer: int
    texts: int = 0
    tokens: int = 0
    queried: int = 0
    energy: float = 0.0
    queries: Tensor | float = 0.0
    keys: Tensor | float = 0.0
    values: Tensor | float = 0.0
    metric: Tensor | None = None
    classes: dict[int, ClassSums] = field(default_factory=dict)
    information: tuple[Tensor, Tensor] | None = None
    pairs: RotaryMean | None = None  # of the first text; the others add to what follows
    turned_back: Tensor | float = 0.0
    expected: tuple[Tensor, Tensor] | None = None

    def add(self, call: AttentionCall, positions: Tensor, frequencies: Sequence[Tensor] = ()) -> None:
        """Add one text.

        Parameters
        ----------
        call : AttentionCall
            Of the layer's attention, of a batch of one and without padding.
        positions : Tensor
            ``(L,)``.
        frequencies : sequence of Tensor
            Those that the model may turn keys by (`choose_pairs`).
        """
        queries, keys, values = call.query[0], call.key[0], call.value[0]
        heads, length = keys.shape[:2]
        scaled = (_precise(queries) * call.scaling).reshape(heads, -1, queries.shape[-1])
        self.queries = self.queries + self._checked("queries", scaled.mT @ scaled)
        self.queried += scaled.shape[1]
        if self.metric is None:
            self.metric = value_metric(call.module, heads, call.output)
        # Sinks may be of another size; of the others, some show the mean.
        self.energy += output_energy(call.module, call.output[:, SINKS::ENERGY_STRIDE])
        inner = slice(SINKS, length - WINDOW)
        counts = observed_queries(length)
        places = torch.nonzero(counts)[:, 0]
        observed = queries[:, places.to(queries.device)]
        received = attention_moments(observed, counts[places], keys, call.scaling, call.softcap)
        first, second = (moment[:, inner] for moment in received)
        order = first.argsort(dim=-1, descending=True, stable=True)
        weights = [weight.gather(-1, order) for weight in token_weights(first, second)]
        sizes = class_sizes(order.shape[1])
        places, plain = positions[inner], _precise(keys[:, inner])
        asked = scaled.square().mean(1)
        sums = [_on_cpu(each) for each in expected_sums(plain, first, second)]
        self.expected = tuple(sums if self.expected is None else map(torch.add, self.expected, sums))  # type: ignore[assignment]
        if not self.texts and plain.isfinite().all():
            self.pairs = choose_pairs(plain, asked, places, frequencies)
        if self.pairs is not None:
            own = replace(self.pairs, mean=self.pairs.turned_back(plain, places).float())
            self.turned_back = self.turned_back + _on_cpu(own.mean)
            plain = own.taken_off(plain, torch.ones(heads, dtype=torch.float32, device=plain.device), places)
        parts = []
        for name, stored, weight in (("keys", plain, weights[0]), ("values", _precise(values[:, inner]), weights[1])):
            centred = stored
            centred = centred - centred.mean(1, keepdim=True)
            setattr(self, name, getattr(self, name) + self._checked(name, centred.mT @ centred))
            ordered = centred.gather(1, order[..., None].expand_as(centred))
            split = zip(
                torch.split(ordered, list(sizes), 1), torch.split(weight[..., None], list(sizes), 1), strict=True
            )
            parts.append(torch.stack([_on_cpu((part * share).mT @ part) for part, share in split]))
        self.texts += 1
        self.tokens += order.shape[1]
        now = ClassSums(1, torch.tensor(sizes, dtype=torch.float64, device="cpu"), *parts)
        old = self.classes.get(len(sizes))
        self.classes[len(sizes)] = now if old is None else _added(old, now)

    def add_information(self, keys: Tensor, values: Tensor) -> None:
        """Add one text's Fisher information (`sensitivity.information`)."""
        self._checked("gradients of keys", keys)
        self._checked("gradients of values", values)
        old = self.information
        self.information = (keys, values) if old is None else (old[0] + keys, old[1] + values)

    def bases(self) -> tuple[Basis, Basis]:
        """Return the bases of keys and values.

        The energies are what an error costs: squared change of the logits, and of the layer's output in proportion to
        the output's own mean square.
        """
        metric = _tensor(self.queries) / self.queried
        output = _tensor(0.0 if self.metric is None else self.metric) / (self.energy / self.texts or 1.0)
        if not (metric.isfinite().all() and output.isfinite().all()):
            raise self._not_finite("squares of queries or of the output projection")
        rotary = None
        if self.pairs is not None:
            rotary = replace(self.pairs.to("cpu"), mean=(_tensor(self.turned_back) / self.texts).float())
        return (
            replace(_basis(metric, _tensor(self.keys) / self.tokens), rotary=rotary),
            _basis(output, _tensor(self.values) / self.tokens),
        )

    def expects(self) -> Tensor:
        """Return what keys say of the attention that their tokens receive, ``(H, 2 d, 2)`` (`expected.directions`)."""
        assert self.expected is not None
        return directions(*self.expected)

    def losses(self, keys: Basis, values: Basis) -> tuple[list[Tensor], list[Tensor]]:
        """Return what the channels of keys and of values lose without any bits, ``(C, H, d)`` for each of `classes`."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for sums in self.classes.values():
            for basis, moments, into in zip((keys, values), (sums.keys, sums.values), found, strict=True):
                encode = basis.encode.double()
                squares = ((moments @ encode) * encode).sum(-2).clamp(min=0) / sums.texts
                into.append(squares * basis.energy)
        return found

    def mean_loss(self, losses: list[Tensor]) -> Tensor:
        """Return the mean over texts of what each head loses without any bits, ``(H,)``."""
        parts = zip(losses, self.classes.values(), strict=True)
        return torch.stack([each.sum((0, 2)) * sums.texts / self.texts for each, sums in parts]).sum(0)

    def steps(self, losses: list[Tensor], factor: Tensor | float = 1.0) -> list[tuple[Tensor, Tensor, float]]:
        """Return at which prices heads take more bits (`rates.steps`), by groups of texts with their weights.

        Parameters
        ----------
        losses : list of Tensor
            Those of keys or of values.
        factor : Tensor or float
            By which each head's losses count more, ``(H,)``.
        """
        weight = _tensor(factor)[..., None]
        return [
            (*steps(each * weight, (sums.sizes / sums.texts).tolist()), sums.texts / self.texts)
            for each, sums in zip(losses, self.classes.values(), strict=True)
        ]

    def _checked(self, name: str, squares: Tensor) -> Tensor:
        """Return sums of squares on the CPU; they are finite if what was squared is, and not too large."""
        if not squares.isfinite().all():
            raise self._not_finite(name)
        return _on_cpu(squares)

    def _not_finite(self, name: str) -> CalibrationError:
        return CalibrationError(
            f"layer {self.layer}, text {self.texts + 1}: the {name} are not finite numbers, so no basis can be made; "
            "load the model in bfloat16 or float32, and check that it answers sensibly"
        )


def _basis(metric: Tensor, moment: Tensor) -> Basis:
    found = joint_basis(metric, moment)
    # Without the floors of `joint_basis`: what nothing asks for costs nothing. Positive, so that files can be checked.
    return replace(found, energy=energy_in(found, metric).clamp(min=torch.finfo(torch.float64).tiny))


def _added(old: ClassSums, now: ClassSums) -> ClassSums:
    return ClassSums(old.texts + 1, old.sizes + now.sizes, old.keys.add_(now.keys), old.values.add_(now.values))


def _precise(tensor: Tensor) -> Tensor:
    """Return it in float64, if the device has it: rounding makes singular moments indefinite."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def _tensor(sums: Tensor | float) -> Tensor:
    return torch.as_tensor(sums, dtype=torch.float64, device="cpu")


def _on_cpu(moment: Tensor) -> Tensor:
    return moment.cpu().double()
