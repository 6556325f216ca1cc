"""Checks of what callers pass: numbers, arrays, files and DataFrames."""
