"""The output projection of an attention module, whatever it is called and however its weights are stored.

Its weights are found by feeding it the identity, so that linear layers, GPT-2's Conv1D, quantised layers and those with
LoRA adapters need no cases of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import CalibrationError

#: What transformers' models call it.
PROJECTION_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo", "attention_output", "proj")


def output_projection(module: nn.Module) -> nn.Module:
    """Return the submodule that projects the attention's output.

    Raises
    ------
    CalibrationError
        If there is none of a known name.
    """
    for name in PROJECTION_NAMES:
        found = getattr(module, name, None)
        if isinstance(found, nn.Module):
            return found
    raise CalibrationError(
        f"{type(module).__name__} has no output projection that grace_opt knows ({', '.join(PROJECTION_NAMES)}), so it "
        'is unknown how errors in its values count; write basis="none"'
    )


def value_metric(module: nn.Module, heads: int, like: Tensor) -> Tensor:
    """Return how squared errors in the values of each KV head count in the layer's output, ``(H, d_v, d_v)`` float64.

    Parameters
    ----------
    module : Module
        The attention module.
    heads : int
        Number of KV heads.
    like : Tensor
        ``(B, L, H_q, d_v)``, an output of its attention function.
    """
    projection, (queried, width) = output_projection(module), like.shape[2:]
    group, features = queried // heads, queried * width
    found = []
    for head in range(heads):
        rows = torch.zeros(1, group * width + 1, features, dtype=like.dtype, device=like.device)
        start = head * group * width
        rows[0, : group * width, start : start + group * width].fill_diagonal_(1)
        answer = _fed(module, projection, rows)
        # The last row is zero and shows the bias.
        weights = (answer[0, :-1] - answer[0, -1:]).cpu().double().view(group, width, -1)
        found.append((weights @ weights.mT).sum(0))
    return torch.stack(found)


def projection_weights(module: nn.Module, like: Tensor) -> Tensor:
    """Return the weights ``(H_q · d_v, features)`` float32, without bias.

    Parameters
    ----------
    module : Module
        The attention module.
    like : Tensor
        ``(B, L, H_q, d_v)``, an output of its attention function.
    """
    count = like.shape[2] * like.shape[3]
    rows = torch.zeros(1, count + 1, count, dtype=like.dtype, device=like.device)
    rows[0, :count].fill_diagonal_(1)
    answer = _fed(module, output_projection(module), rows)
    return answer[0, :-1] - answer[0, -1:]  # the last row is zero and shows the bias


def output_energy(module: nn.Module, output: Tensor) -> float:
    """Return the mean squared norm of the layer's attention output, after its projection."""
    answer = _fed(module, output_projection(module), output.flatten(2))
    return float(answer.double().square().sum(-1).mean())


def _fed(module: nn.Module, projection: nn.Module, rows: Tensor) -> Tensor:
    try:
        answer = projection(rows)
    except RuntimeError as error:
        raise CalibrationError(
            f"the output projection of {type(module).__name__} does not take its attention's {rows.shape[-1]} "
            f'features: {error}; write basis="none"'
        ) from error
    found: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return found.float()
