"""Tests; the folders below mirror the tree."""
