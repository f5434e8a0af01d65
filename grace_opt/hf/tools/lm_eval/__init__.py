"""Our caches in lm-evaluation-harness: its tasks and metrics, with each prompt read into a smaller cache first.

`model` has the harness's own Hugging Face model with our cache, `command` starts the harness's command with it. Only
these import lm_eval, which the extra ``lm-eval`` installs. Source: lm-evaluation-harness 0.4.13, the class ``HFLM``.
"""
