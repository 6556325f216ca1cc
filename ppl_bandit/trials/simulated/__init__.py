"""Simulated trials of a design: what one trial is made of, and many of them at once."""
