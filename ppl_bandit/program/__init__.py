"""Readings of a program: what it is, whether it is well formed, what flows where, and the mean of its outcome."""
