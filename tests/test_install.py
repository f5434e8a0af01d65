"""What `make` installs by: uv where it does the same, else pip, which then also says what is wrong."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from tests import install

WANTED = ["-c", "constraints.txt", "-e", ".[demo]"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch):
    """Run with these settings of pip, and whether uv is there, can be had, and succeeds; gives the commands."""

    def run(settings: str = "", there: bool = True, to_be_had: bool = True, succeeds: bool = True) -> list[list[str]]:
        commands = []

        def told(command, env=None, **_):
            commands.append([*command, *(f"{name}={env[name]}" for name in ("SSL_CERT_FILE",) if env and name in env)])
            fails = (command[-1] == "uv" and not to_be_had) or ("uv" in command[:3] and not succeeds)
            return SimpleNamespace(returncode=int(fails), stdout=settings)

        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        monkeypatch.setattr(subprocess, "run", told)
        monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: name if there else None)
        assert install.main(WANTED) == 0
        return commands[1:]  # the first asks pip for its settings

    return run


def test_uv_is_told_where_pip_would_look(said) -> None:
    (command,) = said("global.index-url='https://a'\n:env:.find-links='/b /c'\n:env:.cert='/d'\n")
    told = ["--default-index", "https://a", "--find-links", "/b", "--find-links", "/c", *WANTED, "SSL_CERT_FILE=/d"]
    assert command == [*install.UV, "--index-strategy", "unsafe-best-match", *told]


def test_uv_is_installed_first_in_the_version_that_is_pinned(said) -> None:
    first, second = said(there=False)
    assert first == [*install.INSTALL, *install.FEW_TRIES, "-c", "constraints.txt", "uv"]
    assert second[: len(install.UV)] == install.UV


@pytest.mark.parametrize(
    "here",
    [
        {"settings": "install.require-hashes='1'\n"},  # of which uv is told nothing
        {"there": False, "to_be_had": False},
        {"succeeds": False},
    ],
)
def test_else_pip_installs_the_same(said, here) -> None:
    assert said(**here)[-1] == [*install.INSTALL, *WANTED]
