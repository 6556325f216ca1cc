"""Simulated worlds, and thousands of realizations in them."""
