"""The engine for programs that are conjugate given a few of their sites."""
