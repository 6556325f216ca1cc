"""Inference after adaptive data collection, and off-policy evaluation."""
