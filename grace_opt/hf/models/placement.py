"""Where a model computes: the devices of its layers, and which KV heads are this process's.

Under tensor parallelism, every process ("rank") computes and caches only some of the KV heads. Masks and bits are per
KV head, so ranks exchange nothing; each takes its own heads of what covers all of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def layer_devices(model: PreTrainedModel | PreTrainedConfig, layers: int) -> dict[int, torch.device]:
    """Return the device of every layer's keys: that of its attention projections; the CPU for a configuration."""
    cpu = torch.device("cpu")
    if not isinstance(model, PreTrainedModel):
        return dict.fromkeys(range(layers), cpu)
    found = dict.fromkeys(range(layers), execution_device(model) or cpu)
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            found[index] = execution_device(module) or found[index]
    return found


def execution_device(module: nn.Module) -> torch.device | None:
    """Return where a module computes: as accelerate's hooks say (offloaded weights are elsewhere), else its weights."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for single in getattr(hook, "hooks", (hook,)):
            device = getattr(single, "execution_device", None)
            if device is not None:
                return torch.device(device)
    weights = (parameter.device for parameter in module.parameters() if not parameter.is_meta)
    return next(weights, None)


def input_device(model: PreTrainedModel) -> torch.device:
    """Return where the model's tokens go in; the CPU if no part says."""
    return execution_device(model.get_input_embeddings()) or torch.device("cpu")


def is_tensor_parallel(model: PreTrainedModel) -> bool:
    """Return whether the model was loaded with ``tp_plan=``; old transformers shard it into plain tensors."""
    return (getattr(model, "tp_size", None) or 1) > 1


def ranks() -> int:
    """Return the number of processes that share the model; 1 if this one is alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among those of a tensor-parallel model; 0 if it is alone."""
    return dist.get_rank() if ranks() > 1 else 0


def own_heads(every: int, heads: int) -> slice:
    """Return which of all KV heads these are: the projections' rows are distributed in order, rank r has run r."""
    start = rank() * heads if every == ranks() * heads else 0
    return slice(start, start + heads)
