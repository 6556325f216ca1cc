"""Engines of programs whose latents move: Kalman filter, Kalman filters over particles, particle filter."""
