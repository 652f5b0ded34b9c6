"""Attention layers, one file for each kind."""
