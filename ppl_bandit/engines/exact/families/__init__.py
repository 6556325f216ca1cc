"""Exponential families: natural parameters and draws."""
