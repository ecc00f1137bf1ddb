"""The report of a run: what happened, in pictures and tables, made from the run directory alone.

`collect` reads the records, `plots` draws them, `summary` counts them, `page` puts all of it on one self-contained page.
"""
