"""Programs whose latents move: the keywords `previous` and `elapsed`, and the checks of a transition."""
