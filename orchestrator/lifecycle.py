"""decide(run, observation, now): what to do next about one run. Pure: it reads nothing and touches nothing."""

from orchestrator.api import TrainingRun
from orchestrator.decisions import Decision
from orchestrator.observe import Observation


def decide(run: TrainingRun, observation: Observation, now: float) -> Decision:
    """The next act, end or pause. `now` is UNIX seconds, used for what is shown to people and for jitter-free dates."""
    raise NotImplementedError  # completed in the next change
