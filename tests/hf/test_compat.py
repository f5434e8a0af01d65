"""Which transformers is installed, and what is said if it will not do."""

from __future__ import annotations

import importlib
import types

import pytest

from grace_opt.hf.models import compat as _compat


def test_no_transformers(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(_compat, "importlib", types.SimpleNamespace(import_module=missing))
    with pytest.raises(ImportError, match=r'not installed; write: pip install "\.\[hf\]"'):
        _compat.require_transformers()


@pytest.mark.parametrize("version", ["4.57.1", "5.1.0", "5.0.0rc1"])
def test_old_transformers(version, monkeypatch):
    module = types.SimpleNamespace(__version__=version)
    monkeypatch.setattr(_compat, "importlib", types.SimpleNamespace(import_module=lambda name: module))
    with pytest.raises(ImportError, match=f'>= 5.2, but {version} is installed; write: pip install "\\.'):
        _compat.require_transformers()


@pytest.mark.parametrize("version", ["5.2.0", "5.2.0.dev0", "5.10.1", "5.23.0"])
def test_new_enough_transformers(version, monkeypatch):
    module = types.SimpleNamespace(__version__=version)
    monkeypatch.setattr(_compat, "importlib", types.SimpleNamespace(import_module=lambda name: module))
    _compat.require_transformers()


def test_the_installed_one_will_do():
    _compat.require_transformers()
    assert importlib.import_module("grace_opt.hf")
