"""The pocket model's calibrated basis, which ships with it: ``python -m bench.pocket.basis``.

The texts that other models are calibrated on are unknown words to the pocket model, so it is calibrated on documents of
its own grammar, from a random stream that training did not use. Writes it into the model's folder, where it is found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from bench.pocket.corpus import Documents
from grace_opt.hf import CalibratedBasis, calibrate
from grace_opt.hf.models import POCKET_BASIS, load_pocket

#: Number and length of the documents, their largest share of filler, and the stream that they come from.
TEXTS, TOKENS, MOST_FILLER, SEED = 6, 1024, 0.9, 20_000_000


def calibrated() -> CalibratedBasis:
    """Return the basis."""
    model, tokenizer = load_pocket()
    documents = Documents(tokenizer.backend_tokenizer, SEED)
    texts = [torch.tensor(documents.document(TOKENS, MOST_FILLER)[0]) for _ in range(TEXTS)]
    return calibrate.basis(model, tokenizer, texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=POCKET_BASIS)
    args = parser.parse_args()
    calibrated().save(args.out)
    print(f"wrote {args.out.name}")


if __name__ == "__main__":
    main()
