"""Whether our model computes what another implementation computes with the same weights."""
