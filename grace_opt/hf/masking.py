"""Connect masks to models: which model a mask was made for, static masks, and masks from stored indices.

:func:`fingerprint` reads from a configuration what a `grace_opt.ChannelMask` must agree with. :func:`static_sources`
splits a mask with one entry per layer into the mask sources of a cache, which observe no queries and solve nothing.
:func:`kept_channels` checks what a source returned before keys are cut by it.

Under tensor parallelism, every process ("rank") computes and caches only some of the KV heads. Masks are per KV head,
so ranks exchange nothing; each rank takes its own heads from a static mask of all heads.

Source: static masks per head as in LeanK (arXiv 2508.02215).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.masks import ChannelMask
from ..errors import MaskError


def fingerprint(model: PreTrainedModel | PreTrainedConfig) -> dict[str, int | str]:
    """Return what a mask (or a saved cache) and a model must agree on.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
        The model, or only its configuration. For a composite model, the text decoder's is read.

    Returns
    -------
    dict
        ``model_type``, ``num_hidden_layers``, ``num_key_value_heads`` and ``head_dim``, of all ranks together. A model
        also has ``weights``, a digest of a sample of every parameter, equal in every floating-point type that holds
        bfloat16; it is missing if some weights are elsewhere (sharded over ranks, offloaded to disk). A tensor-parallel
        model has ``tensor_parallel``, because its masks and caches hold only the KV heads of this rank.
    """
    config = model.config if isinstance(model, PreTrainedModel) else model
    text = config.get_text_config(decoder=True)
    heads = int(text.num_attention_heads)
    found: dict[str, int | str] = {
        "model_type": str(text.model_type),
        "num_hidden_layers": int(text.num_hidden_layers),
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    }
    if isinstance(model, PreTrainedModel):
        if is_tensor_parallel(model):
            found["tensor_parallel"] = f"rank {rank()} of {_ranks()}"
        elif has_all_weights(model):
            found["weights"] = weights_digest(model)
    return found


def fingerprint_differences(what: str, made_for: Mapping[str, int | str], here: Mapping[str, int | str]) -> list[str]:
    """Return, in words, how a model differs from the one that something was made for; empty if it fits.

    Parameters
    ----------
    what : str
        What was made, for the words.
    made_for, here : mapping
        Fingerprints. Weights are compared if both are known.

    Examples
    --------
    >>> fingerprint_differences("basis", {"head_dim": 64}, {"head_dim": 128, "weights": "0"})
    ['head_dim: basis 64, model 128']
    """
    differences = [
        f"{name}: {what} {made_for[name]}, model {here[name]}"
        for name in here
        if name != "weights" and name in made_for and here[name] != made_for[name]
    ]
    weights = here.get("weights"), made_for.get("weights")
    if not differences and None not in weights and weights[0] != weights[1]:
        differences.append("the weights differ, as after fine-tuning")
    return differences


def is_tensor_parallel(model: PreTrainedModel) -> bool:
    """Return whether the model was loaded with ``tp_plan=``; old transformers shard it into plain tensors."""
    return (getattr(model, "tp_size", None) or 1) > 1


def has_all_weights(module: nn.Module) -> bool:
    """Return whether all parameters are in this process: none is sharded over ranks, or offloaded to disk."""
    return not any(parameter.is_meta or _is_sharded(parameter) for parameter in module.parameters())


def _is_sharded(parameter: Tensor) -> bool:
    """Return whether it is a DTensor, judged by its attributes: some builds of torch lack the class."""
    return hasattr(parameter, "placements")


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among those of a tensor-parallel model; 0 if it is alone."""
    return dist.get_rank() if _ranks() > 1 else 0


def own_heads(every: int, heads: int) -> slice:
    """Return which of all KV heads these are: the projections' rows are distributed in order, rank r has run r."""
    start = rank() * heads if every == _ranks() * heads else 0
    return slice(start, start + heads)


DIGEST_ENTRIES_PER_PARAMETER = 16


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of names, shapes and some evenly spread entries of every parameter, as bfloat16."""
    sampled = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sampled.update(f"{name} {tuple(parameter.shape)}".encode())
        count = min(DIGEST_ENTRIES_PER_PARAMETER, flat.numel())
        # In integers: float32 cannot count the entries of a large embedding.
        places = torch.from_numpy(np.arange(count, dtype=np.int64) * (flat.numel() - 1) // max(count - 1, 1))
        entries = flat.index_select(0, places.to(flat.device)).to(torch.bfloat16)
        sampled.update(entries.view(torch.int16).cpu().numpy().tobytes())
    return sampled.hexdigest()


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


@dataclass(frozen=True)
class StaticMask:
    """A mask source that ignores queries and keys: the same channels for every prompt.

    Attributes
    ----------
    mask : ChannelMask
        The mask of one layer, ``(H, d)``, or ``(B, H, d)`` with a batch dimension. Under tensor parallelism ``H`` may
        be this rank's share of the KV heads or all heads of all ranks.
    """

    mask: ChannelMask

    def __call__(self, queries: Tensor, keys: Tensor, attention_mask: Tensor | None = None) -> ChannelMask:
        """Return the mask, repeated for every sequence of the batch."""
        pruned, batch = self.mask.pruned, keys.shape[0]
        if pruned.dim() == 3 and pruned.shape[0] != batch:
            raise MaskError(
                f"the static mask was made for {pruned.shape[0]} sequences but the batch has {batch}; to use one "
                f"prompt's mask for all of them, remove its batch dimension: ChannelMask(mask.pruned[:, 0])"
            )
        if pruned.shape[-2] == _ranks() * keys.shape[1]:
            pruned = pruned[..., own_heads(pruned.shape[-2], keys.shape[1]), :]
        return replace(self.mask, pruned=pruned.expand(batch, *pruned.shape[-2:]))


def static_sources(
    masks: ChannelMask, model: Mapping[str, int | str], prunable: Sequence[int]
) -> dict[int, StaticMask]:
    """Check a mask of a whole model against a model's fingerprint and split it into layers.

    Parameters
    ----------
    masks : ChannelMask
        The first dimension is the layer (all layers of the model, or only the prunable ones); a batch dimension may
        follow.
    model : mapping
        The model's `fingerprint`.
    prunable : sequence of int
        The layers that the cache prunes.

    Returns
    -------
    dict
        One source per prunable layer.

    Raises
    ------
    MaskError
        If the mask was made for another model; the message names the differences.
    """
    shape = tuple(masks.pruned.shape)
    if len(shape) not in (3, 4):
        raise MaskError(
            f"masks= has shape {shape}; give one entry per layer, (layers, KV heads, head_dim), for example with "
            f"ChannelMask.stack"
        )
    known = {"num_key_value_heads": masks.kv_heads, "head_dim": masks.head_dim, **masks.fingerprint}
    ChannelMask(masks.pruned, known).require_fit(model)
    if shape[0] not in (len(prunable), model["num_hidden_layers"]):
        raise MaskError(
            f"the mask was made for another model: it has {shape[0]} layers, the model has "
            f"{model['num_hidden_layers']}, of which {len(prunable)} can be pruned; make one for this model"
        )
    rows = range(len(prunable)) if shape[0] == len(prunable) else prunable
    return {layer: StaticMask(masks.layer(row).counted()) for layer, row in zip(prunable, rows, strict=True)}


def kept_channels(mask: ChannelMask, keys: Tensor) -> Tensor:
    """Return the indices of the kept channels as the cache stores them, after checking that they fit the keys.

    Parameters
    ----------
    mask : ChannelMask
        What a mask source returned for these keys.
    keys : Tensor
        ``(B, H, S, d)``.

    Returns
    -------
    Tensor
        ``(B, H, d')`` int64, sorted, on the keys' device, owning its memory.
    """
    expected = (keys.shape[0], keys.shape[1], keys.shape[3])
    found = tuple(mask.pruned.shape) if isinstance(mask, ChannelMask) else type(mask).__name__
    if found != expected:
        raise MaskError(
            f"the mask source returned {found} for keys with (batch, KV heads, head_dim) = {expected}; it must "
            f"return a ChannelMask with an entry per sequence, KV head and channel"
        )
    if mask.pruned_per_head is None:
        mask = mask.counted()
    if mask.pruned_per_head is None:
        counts = sorted(set((~mask.pruned).sum(-1).flatten().tolist()))
        raise MaskError(
            f"the mask keeps between {counts[0]} and {counts[-1]} channels per KV head, but this cache needs the "
            f"same number in all heads of a layer; give a mask that keeps equally many in every head"
        )
    # Not mask.kept_indices: if the numbers were not finite, a mask may keep another number of channels than it says,
    # and an index out of range destroys a GPU's context. Sorting gives valid indices; check_numbers reports the cause.
    kept = (~mask.pruned).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return (
        kept[..., : mask.head_dim - mask.pruned_per_head].to(keys.device).clone(memory_format=torch.contiguous_format)
    )


def mask_from_kept(kept_indices: Tensor, head_dim: int) -> ChannelMask:
    """Return the mask that keeps exactly these channels; inverse of :func:`kept_channels`.

    Parameters
    ----------
    kept_indices : Tensor
        ``(B, H, d')`` int64.
    head_dim : int
        Width ``d`` of a dense head.
    """
    kept = kept_indices.cpu()
    pruned = torch.ones(*kept.shape[:-1], head_dim, dtype=torch.bool)
    return ChannelMask(pruned.scatter_(-1, kept, False), pruned_per_head=head_dim - kept.shape[-1])
