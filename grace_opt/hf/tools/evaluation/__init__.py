"""What a smaller cache costs: next-token distributions compared with the dense cache's, answers, and bits counted.

When: to compare settings, or methods of other people, on texts of your own. Read a prompt with a dense cache and with
a smaller one, feed both the same later tokens (`next_token_log_probs`), and compare (`compare_predictions`): all layers
count at once. `ask` scores the answer to a question that comes after the cache was compressed, so that no query of the
prompt had looked for it. Quality without size says little: `stored_bits` counts what a `CompressedCache` holds, and
`stated_bits` takes the count of a method that only reconstructs tensors. Both refuse what was not compressed.
`output_error` says in which layer.

Source: KL divergence by next token is llama.cpp's test of quantised weights; retrieval follows Kamradt's
needle-in-a-haystack test (2023).
"""

from __future__ import annotations

from .answers import AnswerScore, ask, score_answer
from .outputs import output_error
from .predictions import PredictionDifference, compare_predictions, next_token_log_probs
from .sizes import StoredBits, stated_bits, stored_bits

__all__ = [
    "AnswerScore",
    "PredictionDifference",
    "StoredBits",
    "ask",
    "compare_predictions",
    "next_token_log_probs",
    "output_error",
    "score_answer",
    "stated_bits",
    "stored_bits",
]
