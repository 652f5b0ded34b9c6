"""Checkpoints of other libraries: read, and written."""
