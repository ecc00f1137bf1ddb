"""`python -m orchestrator` is `untildone`."""

from orchestrator.cli import entry

entry()
