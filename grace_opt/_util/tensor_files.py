"""Safetensors files with a format name, a version, and a digest that shows any change.

When: for files that the library itself defines, masks and caches. Safetensors detects truncation, but not a changed
byte, a replaced tensor or edited metadata; the digest does. It is not a signature: anyone who can write the file can
update the digest, so readers check everything they rely on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import GraceError
from .files import path_text, write_tensors


@dataclass(frozen=True)
class TensorFormat:
    """A kind of file.

    Attributes
    ----------
    format, version : str
        As stored in the metadata of what is written.
    what : str
        Name with its article, for messages: "a channel mask".
    error : type
        Type of error that reading and writing raise.
    older : tuple of str
        Versions that are read as well.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from grace_opt.errors import MaskError
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "x.safetensors"
    >>> example = TensorFormat("example", "1", "an example", MaskError)
    >>> example.write(path, {"x": torch.ones(2)}, {"made": "here"})
    >>> example.read(path)
    ({'made': 'here'}, {'x': tensor([1., 1.])})
    """

    format: str
    version: str
    what: str
    error: type[GraceError]
    older: tuple[str, ...] = ()

    def write(self, path: str | os.PathLike[str], tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write tensors and JSON-able values, atomically."""
        # Copies on the CPU: the format does not allow views that share memory.
        owned = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        metadata = {"format": self.format, "version": self.version, "about": json.dumps(dict(about), sort_keys=True)}
        write_tensors(path, owned, {**metadata, "digest": digest(owned, metadata)}, self.error)

    def read(self, path: str | os.PathLike[str], mapped: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Read the values and the tensors, on the CPU; raises this format's error if the file is wrong.

        If `mapped`, the tensors are the file itself, which nobody may write to from then on; it may be removed.
        """
        path = path_text(path)
        unreadable = f"{path} cannot be read as {self.what} (truncated or not safetensors)"
        try:
            if not os.path.exists(path):
                raise self.error(f"no {self.what.split(' ', 1)[1]} at {path}.")
            if not os.path.isfile(path):
                raise self.error(f"{unreadable}: it is not a regular file.")
            with safe_open(path, framework="pt") as file:
                metadata = dict(file.metadata() or {})
                if metadata.get("format") != self.format:
                    raise self.error(f"{path} is a safetensors file, but not {self.what} of grace_opt.")
                readable = (*self.older, self.version)
                if metadata.get("version") not in readable:
                    raise self.error(
                        f"{path} has format version {metadata.get('version')!r}; this grace_opt reads "
                        f"{' and '.join(map(repr, readable))}: update grace_opt, or save it again."
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if not mapped:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            if metadata.pop("digest", None) != digest(tensors, metadata):
                raise self.error(
                    f"{path} was changed after it was saved, or damaged: its digest differs, so it cannot be trusted. "
                    "Save it again."
                )
            about = json.loads(metadata["about"])
        except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
            if isinstance(error, GraceError):
                raise
            raise self.error(f"{unreadable}: {error}") from error
        if not isinstance(about, dict):
            raise self.error(f"{path}: the metadata are no JSON object.")
        return about, tensors


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of metadata and of tensors on the CPU: their names, types, shapes and bits."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
