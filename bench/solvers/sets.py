"""The instances: which sets there are, where each comes from, and how an instance's name becomes its matrix.

==============  ========================================================================================================
``heads``       every key-value head of a real model: ``python -m bench.solvers fetch heads`` captures them
``pairs``       two heads of one layer side by side, from the same run of the model
``attention``   `grace_opt.instances.generators.attention`, by seed: nothing to fetch
``k_cluster``   `grace_opt.instances.generators.k_cluster`, by seed
``dispersion``  `grace_opt.instances.generators.dispersion`, by seed
``mixed``       normal weights of both signs, by seed
``kcluster``    Lambert's k-cluster library, with proved optima: `COLLECTIONS`
``mdplib``      MDPLIB, with the best known values: `COLLECTIONS`
==============  ========================================================================================================

An instance is named by its file below the data folder, ``heads.npz#17`` being one matrix of several and
``heads.npz#all`` the batch; or by its generator, ``attention:128:3`` (n, seed),
``k_cluster:40:0.25:0`` (n, density, seed).
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from bench.solvers.checks import Array
from grace_opt import instances
from grace_opt.instances import generators

#: The public instances: file, n, k, best known value, SHA-256.
PUBLISHED = Path(__file__).parent / "published.csv"
#: Files that `fetch` makes from a model, by the name of their set.
CAPTURED = {"heads": "heads.npz", "pairs": "pairs.npz"}


@dataclass(frozen=True)
class Published:
    """A public instance: its file, size, best known value (a maximum), and the SHA-256 of its lines."""

    file: str
    n: int
    k: int
    best: str
    sha256: str


@dataclass(frozen=True)
class Collection:
    """Public instances.

    Attributes
    ----------
    title, page : str
        What it is, and the page that it is published on.
    archive : str
        Address of a zip file that holds the files; empty where none is known.
    tried : bool
        Whether the archive's address has been tried.
    proved : bool
        Whether the best known values are proved optima.
    """

    title: str
    page: str
    archive: str
    tried: bool
    proved: bool


COLLECTIONS = {
    "kcluster": Collection(
        "Lambert's k-cluster library",
        "https://cedric.cnam.fr/~lamberta/Library/k-cluster.html",
        archive="",
        tried=False,
        proved=True,
    ),
    "mdplib": Collection(
        "MDPLIB (Martí, Gallego, Duarte)",
        "https://grafo.etsii.urjc.es/optsicom/mdp.html",
        archive="https://grafo.etsii.urjc.es/optsicom/mdp/mdplib_2010.zip",
        tried=False,
        proved=False,
    ),
}


@cache
def published(name: str) -> tuple[Published, ...]:
    """The instances of a collection, as `PUBLISHED` lists them."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["set"] == name]
    return tuple(Published(r["file"], int(r["n"]), int(r["k"]), r["best"], r["sha256"]) for r in rows)


def target(name: str, one: Published) -> tuple[float, float]:
    """The published value as f, which counts each pair twice and is a minimum, and what its last decimal leaves open.

    Examples
    --------
    >>> target("kcluster", Published("a.dat", 40, 10, "29", ""))
    (-58.0, 0.0)
    >>> target("mdplib", Published("a.txt", 500, 50, "7833.83", ""))
    (-15667.66, 0.01)
    """
    f = -2 * float(one.best)
    if COLLECTIONS[name].proved:
        return f, 0.0
    # Half a unit of the last decimal stated, twice; or what single precision leaves open: GKD-c_1's 19485.1875 is such
    # a number, and the distances in the file add up to 0.0005 less.
    return f, max(10.0 ** -len(one.best.partition(".")[2]), 2.0**-23 * abs(f))


def lines_digest(content: bytes) -> str:
    """SHA-256 of a text file, whatever its line ends: copies of the public files differ in them.

    Examples
    --------
    >>> lines_digest(b"a\\r\\nb\\r\\n") == lines_digest(b"a\\nb\\n")
    True
    """
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()


def origin(path: Path) -> str:
    """The model that a file's matrices were captured from, and digits that tell them from others.

    What two people captured may differ, by weights and by rounding: so it is part of a cell's settings.
    """
    digits = hashlib.sha256(np.ascontiguousarray(instances.read(path).W).tobytes()).hexdigest()[:12]
    with np.load(path, allow_pickle=False) as file:
        source = str(file["source"]) if "source" in file.files else "unknown"
    return f"{path.stem} of {source} ({digits})"


def shape(data: Path, file: str) -> tuple[int, int]:
    """(number of matrices, n) of a captured file; FileNotFoundError says what makes it."""
    if not (data / file).is_file():
        raise FileNotFoundError(f"there is no {file} in {data}: python -m bench.solvers fetch --data {data}")
    W = instances.read(data / file).W
    return W.shape[0], W.shape[-1]


def load(data: Path, instance: str) -> Array:
    """The matrix (n, n), or the batch (B, n, n), that a name stands for."""
    kind, _, rest = instance.partition(":")
    if rest:
        *numbers, seed = rest.split(":")
        if kind == "mixed":
            return mixed(int(numbers[0]), int(seed))
        more = {"density": float(numbers[1])} if kind == "k_cluster" else {}
        return np.asarray(generators.GENERATORS[kind](int(numbers[0]), int(seed), **more).W)
    name, _, index = instance.partition("#")
    W = instances.read(data / name).W
    return np.asarray(W if index in ("", "all") else W[int(index)])


def mixed(n: int, seed: int) -> Array:
    """Normal weights of both signs, no structure."""
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.normal(size=(n, n)), 1)
    return np.asarray(upper + upper.T + np.diag(rng.normal(size=n)))
