"""Mixture-of-Experts language models in JAX, from one laptop CPU to a GPU cluster."""
