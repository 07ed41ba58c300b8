"""The YAML file of `--config-file`, in horovodrun's form."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from .options import FILE_KEYS, REFUSED
from .problems import LaunchProblem

__all__ = ["read_config_file"]


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read a file of settings.

    Returns:
        Values by the name of the command line's parameter.

    Raises:
        LaunchProblem: PyYAML is missing, the file cannot be read, or it says what hvdlite does
            not understand or not do.
    """
    try:
        import yaml
    except ImportError as error:
        raise LaunchProblem("--config-file needs PyYAML: pip install 'hvdlite[cli]'.") from error
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchProblem(f"--config-file {path} cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise LaunchProblem(f"--config-file {path} must hold sections such as `params:`.")
    values: dict[str, Any] = {}
    for section, entries in content.items():
        if section == "controller":
            if str(entries).lower() != "mpi":
                raise LaunchProblem(f"{path}: controller is {entries}; hvdlite has MPI only.")
            continue
        keys = FILE_KEYS.get(section)
        if keys is None:
            raise LaunchProblem(
                f"{path}: there is no section {section!r}{_near(str(section), FILE_KEYS)}"
            )
        if entries is None:
            continue
        if not isinstance(entries, dict):
            raise LaunchProblem(f"{path}: section {section} must hold `key: value` lines.")
        for key, value in entries.items():
            name = keys.get(key)
            if name is None:
                raise LaunchProblem(f"{path}: {section} has no key {key!r}{_near(str(key), keys)}")
            if value is None:
                continue
            flag = "--" + name.replace("_", "-")
            if flag in REFUSED:
                if value is False:
                    continue  # it is off anyway
                raise LaunchProblem(f"{path}: {section}.{key}: {REFUSED[flag][1]}")
            if isinstance(value, list):
                value = ",".join(map(str, value))
            if isinstance(value, dict):
                raise LaunchProblem(f"{path}: {section}.{key} takes a single value.")
            values[name] = value
    return values


def _near(word: str, words: Any) -> str:
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(words)}."
