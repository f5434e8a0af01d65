"""Prompts that are too short for their bits, and what to write instead."""

from __future__ import annotations

from ..plan import LayerPlan

#: A prompt with fewer tokens to code stays dense: means and scales would outweigh the codes.
MIN_TOKENS = 64


def why_dense(plan: LayerPlan, length: int) -> str:
    """Say why a prompt of so many tokens stays dense."""
    config, tokens = plan.config, "1 token" if length == 1 else f"{length} tokens"
    recent, first = config.recent_window, config.sink_tokens
    if length < recent + first + MIN_TOKENS:
        return (
            f"the prompt has {tokens}{' left' if config.evict else ''} and stays dense: bits are given from "
            f"{recent + first + MIN_TOKENS} tokens on (sink_tokens={first}, recent_window={recent} and {MIN_TOKENS} "
            "more)"
        )
    return (
        f"the prompt of {length} tokens stays dense: means, widths and classes alone would take more than the bits "
        "asked for; write more bits (16 at most)"
    )


def dense_rows(plan: LayerPlan, short: int, rows: int) -> str:
    """Say that so many of a batch's prompts stay dense."""
    config, stay = plan.config, "stays" if short == 1 else "stay"
    least = config.recent_window + config.sink_tokens + MIN_TOKENS
    return (
        f"{short} of the batch's {rows} prompts {stay} dense: bits are given from {least} tokens on, padding not "
        "counted, and where means, widths and classes alone take no more than the bits asked for"
    )
