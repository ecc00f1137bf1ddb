"""The training program: OLMo 3 in JAX, with exact resume and a data order that is a pure function of the step."""
