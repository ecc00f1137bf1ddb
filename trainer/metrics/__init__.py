"""What a run's records say in curves: names as OLMo-core logs them, files for other tools, comparisons, the alarm."""
