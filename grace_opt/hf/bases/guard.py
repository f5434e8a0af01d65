"""`Guard`: what is done if a prompt is so unlike the calibration that model and basis may not belong together."""

from __future__ import annotations

from ..._util.warning import warn
from ...errors import CalibrationError
from ..settings.bits import GUARDS
from .divergence import LIMITS, Divergence


class Guard:
    """Checks each layer of a prompt; of a cache's layers, the first that is unlike warns, or raises.

    With ``guard="dense"``, each that is unlike is not coded.

    Parameters
    ----------
    kind : str
        One of `GUARDS`.
    first : int
        The cache's first coded layer, with which a prompt begins.
    """

    def __init__(self, kind: str, first: int) -> None:
        assert kind in GUARDS
        self._kind, self._first, self._told = kind, first, False

    @property
    def is_off(self) -> bool:
        """Whether nothing has to be measured."""
        return self._kind == "off"

    def check(self, layer: int, found: Divergence) -> bool:
        """Take in a layer's divergence, and say if it is too large.

        Returns
        -------
        bool
            Whether the layer has to stay dense.

        Raises
        ------
        CalibrationError
            If it is, and ``guard="raise"``.
        """
        self._told = self._told and layer != self._first
        what, share = found.largest
        dense = self._kind == "dense"
        if share <= 1 or self._told:
            return share > 1 and dense
        said = (
            f"layer {layer}: the prompt's {what} are unlike those of the calibration (by {getattr(found, what):.2g} "
            f"nats per coordinate; ordinary text stays below {LIMITS[what]:g}), so its codes "
            f"{'would' if dense else 'may'} leave far more error than their bits usually do"
            f"{', and it stays dense, as do others like it' * dense}. If the model or its basis has changed, make the "
            "basis anew; if such prompts are usual, calibrate on some of them: grace-opt calibrate basis MODEL "
            "--text FILE -o FILE, and basis=FILE"
        )
        if self._kind == "raise":
            raise CalibrationError(said)
        self._told = True
        warn(said if dense else f'{said}; guard="off" says nothing')
        return dense
