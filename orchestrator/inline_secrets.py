"""Secrets that stand in a document in plain text, found and refused. The value itself is never repeated."""

import re
from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigurationError

# Prefixes and shapes of credentials in common use, and names whose plain value is one for certain. Written so that the
# API server understands them too (RE2): the custom resource has them as rules. And so that the time they take grows with
# the text, not with its square: what may be long begins in few places, or one spec would hold up all runs.
TOKEN = (
    r"hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{8,}|AKIA[A-Z0-9]{12,}|ASIA[A-Z0-9]{12,}"
    r"|AIza[\w-]{20,}|ya29\.[\w-]{16,}|(^|[^\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.|-----BEGIN [A-Z ]*PRIVATE KEY|[Bb]earer\s+\S{8,}|[a-z]://[^/\s:@]+:[^/\s@]+@"
)
SECRET_NAME = r"(?i)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)$"
PATH = r"[/.~][\w./-]*"  # a path to a mounted secret is a reference, not a secret
INSTEAD = (
    "put it into a Secret and refer to it: env: [{name: NAME, valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}}]"
)

_TOKEN, _SECRET_NAME, _PATH = re.compile(TOKEN), re.compile(SECRET_NAME), re.compile(PATH)


def refuse_inline_secrets(data: Mapping[str, Any], source: str) -> None:
    """Raises ConfigurationError when a value anywhere looks like a credential. The value itself is never repeated."""
    spec = data.get("spec")
    env = spec.get("env") if isinstance(spec, Mapping) else None
    for index, variable in enumerate(env if isinstance(env, list) else ()):
        if not isinstance(variable, Mapping):
            continue
        name, value = str(variable.get("name", "")), variable.get("value")
        if isinstance(value, str) and value and _SECRET_NAME.search(name) and not _PATH.fullmatch(value):
            raise ConfigurationError(_secret_error(f"{source}: spec.env.{index}.value ({name})"))
    for field, value in _strings(data, ""):
        if _TOKEN.search(value):
            raise ConfigurationError(_secret_error(f"{source}: {field}"))


def _secret_error(where: str) -> str:
    return (
        f"{where}: looks like a secret, and a secret in a spec can be read by everybody who can read the run; {INSTEAD}"
    )


def _strings(node: Any, path: str) -> list[tuple[str, str]]:
    """Every string below `node` with its dotted path."""
    if isinstance(node, str):
        return [(path, node)]
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    return [pair for key, value in items for pair in _strings(value, f"{path}.{key}" if path else str(key))]
