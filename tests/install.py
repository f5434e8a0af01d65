"""Install into this interpreter's environment, by uv where it does what pip would: ``python tests/install.py -e .``.

When: `make` fills .venv. uv unpacks many packages at once; pip, one after the other, takes four times as long. uv reads
none of pip's settings, so those that say where packages come from are passed on. If there are others, if uv cannot be
had, or if it fails for whatever reason, pip installs, and says what is wrong.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
#: What is imported is compiled at its first import: most of what is installed never is. uv compiles nothing unasked.
INSTALL = [*PIP, "install", "--quiet", "--no-compile"]
#: Where nothing can be downloaded, that is soon known: what is to be installed may be on the machine.
FEW_TRIES = ["--retries", "1", "--timeout", "15"]
UV = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
#: pip's settings that say where packages come from, and what uv calls them. Each may have several values.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "constraint": "--constraints",
}
VARIABLES = {"cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT"}
#: Settings that change nothing of what is installed.
OTHERS = {"disable-pip-version-check", "no-input", "progress-bar", "no-color", "quiet", "root-user-action"}


def settings_of(listed: str) -> dict[str, str]:
    """Read what ``pip config list`` prints; variables of the environment come before what files say.

    Examples
    --------
    >>> settings_of("global.index-url='https://a'\\n:env:.index-url='https://b'\\nlist.format='json'")
    {'index-url': 'https://b'}
    """
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found:
            found[section][key] = ast.literal_eval(value)
    return {**found["global"], **found["install"], **found[":env:"]}


def for_uv(settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """Return options and variables by which uv does what pip would with these settings; None: that is not known.

    Examples
    --------
    >>> for_uv({"find-links": "/a /b", "timeout": "60"})
    (['--index-strategy', 'unsafe-best-match', '--find-links', '/a', '--find-links', '/b'], {'UV_HTTP_TIMEOUT': '60'})
    >>> for_uv({"only-binary": ":all:"})
    """
    if not settings.keys() <= {*OPTIONS, *VARIABLES, *OTHERS}:
        return None
    options = ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of all indexes
    for name, option in OPTIONS.items():
        for value in settings.get(name, "").split():
            options += [option, value]
    return options, {own: settings[name] for name, own in VARIABLES.items() if name in settings}


def by_uv(arguments: Sequence[str]) -> bool:
    """Install by uv, and return whether it did."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    given = None if listed.returncode else for_uv(settings_of(listed.stdout))
    if given is None:
        return False
    if importlib.util.find_spec("uv") is None:
        got = subprocess.run([*INSTALL, *FEW_TRIES, "-c", "constraints.txt", "uv"], capture_output=True, check=False)
        if got.returncode:
            return False
    options, variables = given
    done = subprocess.run(
        [*UV, *options, *arguments], env={**os.environ, **variables}, capture_output=True, check=False
    )
    return done.returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Install what arguments of pip name."""
    return 0 if by_uv(arguments) else subprocess.run([*INSTALL, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
