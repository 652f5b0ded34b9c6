"""Entry points: parse flags, build, run."""
