"""Token files to batches: mix, order, loader, and the audit that proves what was read. Importable without JAX."""
