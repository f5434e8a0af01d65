"""Differences between versions of transformers, and the check that a supported one is installed.

The adapter runs on transformers 5.2 to the newest 5.x. Three things differ between them (layers that are transformers'
own differ in more: see `grace_opt.hf.models.foreign_layers`):

========================  =======================================  ==========================================
what                      5.2, 5.3                                 5.6 and later; of ``crop``, 5.15
========================  =======================================  ==========================================
``layer.update``          ``(keys, values, cache_kwargs)``         ``(keys, values, *args, **kwargs)``
``get_mask_sizes``        takes a ``cache_position`` tensor        takes the query length, an int
``crop``                  ``max_length``, absolute or negative     ``tokens_to_remove``, zero or negative
========================  =======================================  ==========================================

For the first two, the adapter accepts either argument. For ``crop``, zero means *keep nothing* in old versions and
*remove nothing* in new ones, so `crop_is_relative` tells them apart.

Source: ``transformers/cache_utils.py`` of 5.2.0 and 5.23.0.
"""

from __future__ import annotations

import importlib
import inspect

from torch import nn

from ..._util.optional import pip_install

MINIMUM = (5, 2)

_INSTALL = f"write: {pip_install('hf')}"


def require_transformers() -> None:
    """Raise an ImportError that says what to install, unless transformers 5.2 or newer can be imported."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"grace_opt.hf needs transformers, which is not installed; {_INSTALL}") from error
    version = str(transformers.__version__)
    if release(version) < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        raise ImportError(f"grace_opt.hf needs transformers >= {wanted}, but {version} is installed; {_INSTALL}")


def release(version: str) -> tuple[int, int]:
    """Return the major and minor version; development and pre-releases count as the release they precede.

    >>> release("5.23.0"), release("5.6.0.dev0"), release("5.2rc1")
    ((5, 23), (5, 6), (5, 2))
    """
    numbers = []
    for part in version.split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return numbers[0], numbers[1] if len(numbers) > 1 else 0


def crop_is_relative() -> bool:
    """Return whether ``crop`` in this transformers takes a number of tokens to remove, not a length to keep."""
    from transformers.cache_utils import DynamicLayer

    return "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters


def weights_may_be_read(module: nn.Module) -> bool:
    """Return whether somebody may read the attention weights that `module` returns in the forward pass that runs now.

    A model that records its outputs says what it collects, and others listen by hooks. True of models that do not say.
    """
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get()
    if collected is None or any("attentions" in name for name in collected):
        return True
    # Its own hooks, which stay once there was something to collect, do nothing now.
    hooks = module._forward_hooks.values()
    return any(getattr(hook, "__module__", None) != output_capturing.__name__ for hook in hooks)
