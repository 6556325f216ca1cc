"""Weighted particles: resampling, moves and diagnostics shared by the engines that draw."""
