"""Table 2: LongBench with Mistral-7B-Instruct-v0.2, SnapKV at KV sizes 256 and 512.

The checkpoint wants a GPU of 24 GB. Source: GRACE (arXiv 2604.16983), Table 2.
"""

from __future__ import annotations

from bench.experiments.longbench.experiment import Options, Subject, experiment

EXPERIMENT = experiment(
    Subject(2, "mistralai/Mistral-7B-Instruct-v0.2"),
    full=Options(data="hub", budgets=(256, 512), max_input=31500),
    pocket=Options(examples=2, budgets=(64, 128), max_input=384, max_new=12, held_back=1),
)
