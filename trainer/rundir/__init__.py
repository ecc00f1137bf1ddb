"""The run directory: the whole contract between trainer and orchestrator. Importable without JAX."""
