"""Prove that a program is conjugate."""
