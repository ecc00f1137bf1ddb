"""The operator's configuration file: YAML, checked; unknown keys are refused with the nearest known one."""

import os
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, model_validator

from orchestrator.document import Document
from orchestrator.operating.tenancy import EVERYWHERE, below
from trainer.errors import ConfigurationError


class LeaseSettings(Document):
    """Which replica works; the others wait. Saves work only: two that work at once do no harm."""

    enabled: bool = Field(default=True, description="false: this process works without asking")
    name: str = Field(default="untildone", description="of the Lease in coordination.k8s.io")
    namespace: str | None = Field(default=None, description="default: the operator's own, from POD_NAMESPACE")


class Health(Document):
    """Where probes and Prometheus ask."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="of /healthz, /readyz and /metrics, on POD_IP when that is set; 0: a free one",
    )


class Configuration(Document):
    """What `untildone operator --config FILE` reads."""

    run_directories: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="namespace -> prefixes that its runs may name, for their run directories, data, compile caches, and "
        f"what they start from; the key {EVERYWHERE!r} is for namespaces that are not listed; none: every run is refused",
    )
    watch_namespaces: tuple[str, ...] = Field(default=(), description="namespaces looked after; none: all")
    workers: int = Field(default=8, ge=1, le=256, description="runs looked at at the same time")
    lease: LeaseSettings = LeaseSettings()
    health: Health = Health()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _places(self) -> Self:
        for namespace, prefixes in self.run_directories.items():
            for prefix in prefixes:
                if not below(prefix, prefix):
                    raise ValueError(
                        f"runDirectories.{namespace} {prefix!r}: write it as gs://bucket/folder or as an absolute path, "
                        "without '.', '..' or empty folders"
                    )
        return self


def load_configuration(path: str | Path) -> Configuration:
    """The configuration in the YAML file `path`. Raises ConfigurationError naming file, field and fix."""
    try:
        body = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not YAML: {getattr(error, 'problem', None) or error}") from None
    return Configuration.parse(body if body is not None else {}, str(path))


def own_namespace() -> str:
    """The namespace this process runs in; "default" outside a cluster."""
    mounted = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    found = os.environ.get("POD_NAMESPACE") or (mounted.read_text() if mounted.is_file() else "")
    return found.strip() or "default"
