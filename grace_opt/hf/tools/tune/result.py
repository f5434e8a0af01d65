"""`TuneResult`: what `tune` returns: a row for each setting, the recommended one, and where the numbers come from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...._util.files import write_file
from ...._util.optional import require
from ....errors import EvaluationError
from ...settings.config import CacheConfig
from ...settings.config_file import format_settings, write_settings
from .figure import save_frontier
from .recommend import Recommendation, Target
from .rows import TuneRow
from .table import table_of

if TYPE_CHECKING:
    from rich.table import Table

FORMAT, VERSION = "grace_opt.tune", "1"


@dataclass(frozen=True)
class TuneResult:
    """The answer of `tune`; prints as the recommendation.

    Attributes
    ----------
    rows : tuple of TuneRow
        One per setting that was measured, in the order of the candidates.
    target : Target
        What was asked for.
    recommendation : Recommendation or None
        The setting to use; if it has not ``reached`` the target, the closest one. None if nothing of ours was measured.
    left_out : mapping
        Why other settings have no row, by name.
    windows : tuple of dict
        Name, digest and numbers of tokens of each window.
    fingerprint : mapping
        The model; see `grace_opt.hf.models.fingerprint.fingerprint`.
    measured : mapping
        By setting and number of the window, what was measured: the numbers of which the rows are means.
    provenance : mapping
        Date, versions, machine, seed and seconds.
    interrupted, out_of_time : bool
        Whether Ctrl-C or the time limit stopped it.
    """

    rows: tuple[TuneRow, ...]
    target: Target
    recommendation: Recommendation | None
    left_out: Mapping[str, str]
    windows: Sequence[Mapping[str, Any]]
    fingerprint: Mapping[str, int | str]
    measured: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]] = field(default_factory=dict, repr=False)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    out_of_time: bool = False

    def __str__(self) -> str:
        return "nothing could be measured" if self.recommendation is None else str(self.recommendation)

    @property
    def config(self) -> CacheConfig:
        """The recommended settings: ``attach(model, config=result.config)``.

        Raises
        ------
        EvaluationError
            If nothing was measured that keeps the target.
        """
        found = self.recommendation
        if found is None or found.row.candidate.config is None:
            raise EvaluationError(f"no setting can be recommended, as none was measured: {dict(self.left_out)}")
        if not found.reached:
            raise EvaluationError(
                f"no setting can be recommended: {found}. Ask for less, or use it anyway: attach(model, "
                f"{found.row.candidate.words or 'config=result.recommendation.row.candidate.config'})"
            )
        return found.row.candidate.config

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recommended settings as a file that ``attach(model, config=FILE)`` reads; refused elsewhere."""
        write_settings(path, format_settings(self.config.to_dict(), self.fingerprint))

    def table(self) -> Table:
        """Return the rows as a table of rich: print it with ``rich.print``."""
        return table_of(self)

    def to_frame(self) -> Any:
        """Return the rows as a pandas DataFrame: means, and the ends of their intervals as ``NAME_low``, ``NAME_high``.

        Raises
        ------
        OptionError
            If pandas is not installed.
        """
        return require("pandas", "bench", "to_frame()").DataFrame([row.values() for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        found = self.recommendation
        return {
            "format": FORMAT,
            "version": VERSION,
            "target": {"kind": self.target.kind, "value": self.target.value},
            "recommended": found.row.name if found is not None and found.reached else None,
            "reached": found is not None and found.reached,
            "recommendation": str(self),
            "rows": [{**row.values(), "kls": row.kls, "settings": row.candidate.settings()} for row in self.rows],
            "left_out": dict(self.left_out),
            "windows": [dict(one) for one in self.windows],
            "fingerprint": dict(self.fingerprint),
            "provenance": dict(self.provenance),
            "interrupted": self.interrupted,
            "out_of_time": self.out_of_time,
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return everything as JSON; also write it to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        if path is not None:
            write_file(path, text)
        return text

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the frontier as PNG: KL against the share of the bytes.

        Raises
        ------
        OptionError
            If matplotlib is not installed.
        EvaluationError
            If nothing was measured.
        """
        save_frontier(self.rows, self.target, self.recommendation, path)
