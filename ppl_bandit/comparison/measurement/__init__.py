"""Measure posteriors and models against each other."""
