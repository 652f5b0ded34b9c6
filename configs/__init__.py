"""Recipes: functions that return a complete config, one file for each model family."""
