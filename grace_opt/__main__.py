"""``python -m grace_opt`` is ``grace-opt``."""

from .cli import run

run()
