"""``python -m grace_opt`` is ``grace-opt``."""

from .cli.app import run

run()
