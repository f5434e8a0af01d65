"""Blocks in LMCache: a serde called ``grace_opt``, for what it writes to disks or sends.

``python -m grace_opt.serving.lmcache server ...`` is ``lmcache server ...`` with the serde; in a program of your own,
`register` makes it known. An adapter's settings then name it, with the file of the model's basis::

    {"type": "fs", "base_path": "/cache", "serde": {"type": "grace_opt", "basis": "basis.safetensors", "bits": 2.5}}

LMCache gives it tensors ``[2, layers, tokens, heads × channels]`` in a pool of threads, and asks for the size of a
buffer before (version 0.5.6, with which this was tried).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from .._util.names import did_you_mean
from .._util.parameters import integer
from ..errors import CacheError, MissingLibraryError, OptionError
from .block_codec import BlockCodec

#: What an adapter's settings call it, and what else they may say.
NAME, SETTINGS = "grace_opt", ("basis", "bits", "max_workers")


def register(name: str = NAME) -> None:
    """Make the serde known to LMCache, in this process.

    Parameters
    ----------
    name : str
        For ``"serde": {"type": name}``.

    Raises
    ------
    MissingLibraryError
        If LMCache is not installed, or one without serdes.
    ValueError
        LMCache's own, if it knows a serde of this name.
    """
    _lmcache().register_serde_factory(name, processor)


def processor(settings: Mapping[str, Any]) -> Any:
    """Return LMCache's ``SerdeProcessor`` of our codec.

    Parameters
    ----------
    settings : mapping
        ``basis``, a file; ``bits``, 2.5 if missing; ``max_workers``, threads, 1 if missing.

    Raises
    ------
    OptionError, CalibrationError
        If these are others, or the file is none of a basis.
    """
    if unknown := [each for each in settings if each not in SETTINGS]:
        hint = did_you_mean(unknown[0], SETTINGS)
        raise OptionError(f"the serde has no setting {unknown[0]!r}; it knows {', '.join(SETTINGS)}.{hint}")
    if not isinstance(settings.get("basis"), str):
        raise OptionError(
            'the serde needs "basis": FILE of the model; make it: grace-opt calibrate basis MODEL -o FILE'
        )
    codec = BlockCodec(settings["basis"], settings.get("bits", 2.5))
    workers = integer("max_workers", settings.get("max_workers", 1), at_least=1)
    serde = _lmcache()

    class Serializer(serde.Serializer):  # type: ignore[misc,name-defined]
        """Codes a block into LMCache's buffer."""

        def serialize(self, src: Any, dst: Any, key: Any = None) -> int:
            data, buffer = codec.encode(_tensor(src)), _tensor(dst).flatten()
            if buffer.dtype != torch.uint8 or len(buffer) < len(data):
                raise CacheError(f"the buffer has {buffer.nbytes} bytes of {buffer.dtype}, and {len(data)} are needed")
            buffer[: len(data)].copy_(data)
            return len(data)

        def estimate_serialized_size(self, layout_desc: Any) -> int:
            if len(layout_desc.shapes) != 1:
                raise CacheError(f"blocks have all layers in one tensor, and this one has {len(layout_desc.shapes)}")
            codec.check_shape(layout_desc.shapes[0])
            return codec.nbytes(int(layout_desc.shapes[0][2]), layout_desc.dtypes[0])

    class Deserializer(serde.Deserializer):  # type: ignore[misc,name-defined]
        """Reads a block from LMCache's buffer."""

        def deserialize(self, src: Any, dst: Any, key: Any = None) -> None:
            found, into = codec.decode(_tensor(src).flatten().cpu()), _tensor(dst)
            if found.shape != into.shape or found.dtype != into.dtype:
                raise CacheError(
                    f"the block has {found.dtype} {tuple(found.shape)}, and {into.dtype} {tuple(into.shape)} is asked "
                    "for"
                )
            into.copy_(found)

    return serde.AsyncSerdeProcessor(Serializer(), Deserializer(), max_workers=workers)


def _tensor(memory: Any) -> torch.Tensor:
    if memory.tensor is None:
        raise CacheError("LMCache's memory object holds no tensor")
    found: torch.Tensor = memory.tensor
    return found


def _lmcache() -> Any:
    """Return LMCache's serdes."""
    try:
        return importlib.import_module("lmcache.v1.distributed.serde")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lmcache":
            raise
        raise MissingLibraryError(
            "the serde needs LMCache with serdes, such as version 0.5.6, which is not installed: pip install lmcache"
        ) from None


def main() -> None:
    """Run LMCache's command line, with the serde."""
    try:
        register()
    except MissingLibraryError as error:
        raise SystemExit(f"grace_opt: {error}") from None
    importlib.import_module("lmcache.cli.main").main()


if __name__ == "__main__":
    main()
