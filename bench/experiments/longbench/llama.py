"""Table 1: LongBench with Llama-3-8B-Instruct, SnapKV and H2O at KV sizes 512 and 2048.

The checkpoint wants a GPU of 24 GB, and access to it on the Hub. Prompts of 7950 tokens and long summaries together go
beyond its 8192 positions, as they do in the paper's protocol. Source: GRACE (arXiv 2604.16983), Table 1.
"""

from __future__ import annotations

from bench.experiments.longbench.experiment import Options, Subject, experiment

EXPERIMENT = experiment(
    Subject(1, "meta-llama/Meta-Llama-3-8B-Instruct"),
    full=Options(data="hub", evictions=("snapkv", "h2o"), budgets=(512, 2048), max_input=7950),
    pocket=Options(examples=3, evictions=("snapkv", "h2o"), budgets=(96,), max_input=384, max_new=12, held_back=1),
)
