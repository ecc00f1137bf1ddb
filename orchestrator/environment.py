"""The environment that a run gives its trainers, where it is plain text."""

from orchestrator.api import TrainingRun
from trainer.errors import ConfigurationError


def plain_environment(run: TrainingRun) -> dict[str, str]:
    """The run's environment for a cluster that has no Secrets. Raises ConfigurationError for a reference to one."""
    for variable in run.spec.env:
        if variable.value is None:
            raise ConfigurationError(
                f"spec.env {variable.name}: valueFrom.secretKeyRef names a Kubernetes Secret, which the local cluster "
                f"does not have; remove it and export {variable.name} in the shell that starts untildone"
            )
    return {variable.name: variable.value for variable in run.spec.env if variable.value is not None}
