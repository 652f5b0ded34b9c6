"""Pipelines: which layers each rank holds, when it runs what, and the loop that plays it."""
