"""`CalibratedBasis`: a model's bases of keys and values, and how its bits are shared among layers and heads.

Made once per model by `calibrate.basis` and kept in a file. Layers are compressed one after the other while the prompt
is read, so the share of each layer and head is known beforehand: at the price per bit where all heads of all layers
together take the mean asked for, each head takes what the calibration texts say it would.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..._util.parameters import number
from ..._util.tensor_files import digest
from ...errors import CalibrationError
from ..models.arguments import unwrap_model
from ..models.fingerprint import fingerprint as fingerprint_of
from ..models.fingerprint import fingerprint_differences
from .basis import Basis
from .basis_file import FORMAT, NOT_READ, as_tensors, check_contents, from_tensors
from .rates import rates_of_mean


@dataclass(frozen=True)
class CalibratedBasis:
    """Coordinates in which a model's keys and values are stored with few bits, and who gets how many bits.

    Attributes
    ----------
    keys, values : dict
        The `Basis` of each layer that can be compressed, for all its KV heads. On the calibration texts, coordinates
        have variance one. Energies are what a unit of squared error costs: in squared change of the logits for keys;
        for values in squared change of the layer's output, relative to the mean square of that output.
    multipliers : Tensor
        ``(M,)`` float64, ascending: prices per bit.
    key_rates, value_rates : dict
        ``(H, M)`` float32 for each layer: bits per element that each head takes at each price.
    fingerprint : dict
        Which model it was made for; see `grace_opt.hf.models.fingerprint.fingerprint`.
    texts, tokens : int
        Number of calibration texts, and of their tokens.
    kl : Tensor, optional
        ``(M, 2)`` float64: numbers of bits, ascending, and the KL that `calibrate.kl` has measured with each; None if
        nobody has asked for it.
    expected : dict
        ``(H, 2 d, 2)`` float32 for each layer: what a key says of the attention that its token will receive
        (`grace_opt.hf.bases.expected`). Empty in files from before it was measured; only blocks need it.

    Examples
    --------
    >>> import torch
    >>> from grace_opt.hf import calibrate
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> basis = calibrate.basis(model, tokenizer, ["the quiet river runs past a late singer " * 40])
    >>> shares = basis.shares(2.25, 2.0)
    >>> round(float(torch.stack([keys for keys, _ in shares.values()]).mean()), 9)
    2.25
    """

    keys: dict[int, Basis]
    values: dict[int, Basis]
    multipliers: Tensor
    key_rates: dict[int, Tensor]
    value_rates: dict[int, Tensor]
    fingerprint: dict[str, int | str] = field(default_factory=dict)
    texts: int = 0
    tokens: int = 0
    kl: Tensor | None = None
    expected: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse tensors that do not belong together."""
        check_contents(self)

    @property
    def layers(self) -> tuple[int, ...]:
        """Positions of the layers in the model, ascending."""
        return tuple(self.keys)

    def digest(self) -> str:
        """Return a digest of all numbers: what was coded in one basis is read in none but the same."""
        read = {name: tensor.cpu() for name, tensor in as_tensors(self).items() if not name.endswith(NOT_READ)}
        return digest(read, {})

    def shares(
        self, key_bits: float, value_bits: float, tokens: Sequence[int] | None = None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Share bits among the heads of all layers.

        Parameters
        ----------
        key_bits, value_bits : float
            Mean bits per element over all heads of all layers, from 0 to 16.
        tokens : sequence of int, optional
            Number of tokens that each layer codes, by which it counts in the mean; by default all as many.

        Returns
        -------
        dict
            For each layer, bits per element of each head's keys and of its values, ``(H,)`` float64. No share falls
            where the mean rises, and none is above 8 unless the mean is.
        """
        found = []
        requested = ("key_bits", key_bits, self.key_rates), ("value_bits", value_bits, self.value_rates)
        for name, wanted, curves in requested:
            mean = number(name, wanted, at_least=0, at_most=16)
            heads = [len(each) for each in curves.values()]
            weights = None
            if tokens is not None:
                coded, times = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in (tokens, heads))
                weights = coded.repeat_interleave(times)
            found.append(torch.split(rates_of_mean(torch.cat(list(curves.values())), mean, weights), heads))
        return dict(zip(self.layers, zip(*found, strict=True), strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; raises `CalibrationError` if it cannot be written."""
        about = {"fingerprint": self.fingerprint, "texts": self.texts, "tokens": self.tokens}
        FORMAT.write(path, as_tensors(self), about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CalibratedBasis:
        """Read a file that `save` wrote; raises `CalibrationError` if it is another, or damaged."""
        about, tensors = FORMAT.read(path)
        try:
            return cls(**from_tensors(about, tensors))
        except CalibrationError as error:
            raise CalibrationError(
                f"{os.fspath(path)}: {error} Make it anew: grace-opt calibrate basis MODEL -o FILE"
            ) from None

    def check_model(self, model: PreTrainedModel | PreTrainedConfig) -> None:
        """Raise `CalibrationError`, naming every difference, if it was made for another model.

        Parameters
        ----------
        model : PreTrainedModel or PreTrainedConfig
            The weights are compared if both are known. A tensor-parallel model, each process of which has some of the
            heads, is accepted with the basis of the whole model.
        """
        if not isinstance(model, PreTrainedConfig):
            model = unwrap_model(model, "check_model")
        if differences := fingerprint_differences("basis", self.fingerprint, fingerprint_of(model)):
            raise CalibrationError(
                f"the basis was made for another model ({'; '.join(differences)}); make one for this model: "
                "grace-opt calibrate basis MODEL -o FILE"
            )
