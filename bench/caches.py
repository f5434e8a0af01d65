"""What the caches of benchmarks have in common: dense windows, how sizes are recorded, and a calibrated basis.

The basis is made once, kept beside the records, and read again when a run is resumed. The same calibration twice
differs in last digits, as sums depend on where numbers lie in memory; then no record of the first run would fit the
second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from bench.provenance import is_clean, write_json
from bench.real_model import digest, read_record
from grace_opt.hf import CalibratedBasis, calibrate
from grace_opt.hf.tools.evaluation import StoredBits

#: First and last tokens of a prompt that stay dense, in every row.
SINKS, WINDOW = 4, 32


def sizes_of(found: StoredBits) -> dict[str, float]:
    """Return bits per element, and bytes as a share of a dense cache in 16 bits, for a record."""
    return asdict(found) | {"share": found.share}


def calibrated(
    model: PreTrainedModel, tokenizer: Any, path: Path, source: Mapping[str, Any], **options: Any
) -> tuple[CalibratedBasis, float]:
    """Calibrate on the texts that ship with grace_opt, or read what the same commit has calibrated before.

    Parameters
    ----------
    model, tokenizer : object
    path : Path
        Of the basis, ``.safetensors``.
    source : mapping
        The provenance of now. If files differ from the commit, nothing is read again.
    **options
        Of `calibrate.basis`.

    Returns
    -------
    basis : CalibratedBasis
    seconds : float
        What calibrating took.
    """
    versions = {name: source[name] for name in ("commit", "torch", "transformers")}
    settings = {**versions, "weights": digest(*model.parameters()), **options}
    record = read_record(path.with_suffix(".json"), settings)
    if record is not None and is_clean(source) and path.exists():
        return CalibratedBasis.load(path), record["seconds"]
    start = time.perf_counter()
    basis = calibrate.basis(model, tokenizer, **options)
    seconds = time.perf_counter() - start
    path.parent.mkdir(parents=True, exist_ok=True)
    basis.save(path)
    write_json(path.with_suffix(".json"), {"settings": settings, "seconds": seconds})
    return basis, seconds
