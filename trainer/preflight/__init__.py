"""The step that trains, compiled for a TPU slice on a machine without one, and what its program says about itself.

`worker` lowers and compiles in a process of its own, `hlo` to `buffers` read the optimised program, `accounting` puts
them together, `command` shows them. Importable without JAX, but for `worker`.
"""
