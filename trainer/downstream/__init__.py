"""Downstream tasks during pre-training: AI2's own request files, tokenised and scored as OLMo-core does it in its loop.

catalog.py says which tasks there are, requests.py and mmlu.py read them, choices.py makes token rows of them,
metrics.py makes numbers of log-likelihoods.
"""
