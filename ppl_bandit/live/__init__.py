"""The live bandit: `bandit` decides and learns, `views` reads; `show` renders, `files` saves and loads."""
