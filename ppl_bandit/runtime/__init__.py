"""Compilation, CPU threads, caches and process start: everything that deals with XLA, and the adapters to unstable APIs."""
