"""`run_harness`: the harness's own command, with our model and with errors that say what to do.

When: ``grace-opt lm-eval``. The harness reads its own arguments; ours are in its ``--model_args``. Source:
``lm_eval.__main__`` of lm-evaluation-harness 0.4.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...._util.optional import require
from ....errors import EvaluationError, GraceError, OptionError

#: The harness's other commands, which need no model.
OTHERS = ("ls", "validate")
#: Parts of the names of errors, and of their messages, of whoever needed a network.
_NETWORK = ("Connect", "Offline", "LocalEntryNotFound", "ReadTimeout", "MaxRetry", "DatasetNotFound")


def run_harness(arguments: Sequence[str]) -> None:
    """Run ``lm-eval`` with these arguments and our model.

    Parameters
    ----------
    arguments : sequence of str
        As the harness's command takes them, without ``--model``.

    Raises
    ------
    OptionError
        If the harness is not installed or an argument is wrong.
    EvaluationError
        If a task or a model cannot be had, for instance without a network.
    SystemExit
        As the harness's own parser ends: 0 after help, 2 after wrong arguments.
    """
    require("lm_eval", "lm-eval", "grace-opt lm-eval")
    given = list(arguments)
    if given[:1] == ["run"]:
        del given[0]
    helps = any(each in ("-h", "--help") for each in given)
    if not given or given[0] not in OTHERS:
        if any(each in ("--model", "-M") or each.startswith("--model=") for each in given):
            raise OptionError("leave out --model: it is ours, grace; the harness's own models are in lm-eval")
        given = ["run", *given, "--model", "grace"]
    from lm_eval.__main__ import cli_evaluate

    if given[0] == "run" and not helps:
        from . import model  # noqa: F401  (registers its name)
    before, sys.argv = sys.argv, ["grace-opt lm-eval", *given]
    try:
        with _harness_errors():
            cli_evaluate()
    finally:
        sys.argv = before


@contextmanager
def _harness_errors() -> Iterator[None]:
    """Turn the harness's errors about what it was given into ours; anything else is a bug and keeps its traceback."""
    try:
        yield
    except GraceError:
        raise
    except Exception as error:
        chain = [error, *_causes(error)]
        said = f"{type(error).__name__}: {str(error).strip() or 'no details given'}"
        if any(part in type(each).__name__ for each in chain for part in _NETWORK):
            raise EvaluationError(
                f"a model or the data of a task is not on this machine, and cannot be fetched ({said}). Fetch it where "
                "there is a network, with the same command, and bring the Hub's cache (HF_HOME) here; or give a folder "
                "as pretrained= and a task file with data of your own: --tasks FILE.yaml"
            ) from error
        wrong = isinstance(error, TypeError) and "keyword argument" in str(error)  # a name in --model_args
        if wrong or isinstance(error, ValueError | OSError | AssertionError | ImportError):
            raise EvaluationError(f"the harness cannot go on: {said}") from error
        raise


def _causes(error: BaseException) -> Iterator[BaseException]:
    while (before := error.__cause__ or error.__context__) is not None:
        yield before
        error = before
