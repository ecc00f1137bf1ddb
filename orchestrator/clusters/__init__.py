"""Where gangs run: the Cluster protocol (base) and the clusters that implement it."""
