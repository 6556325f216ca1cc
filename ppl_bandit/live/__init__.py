"""The bandit that decides and learns, one interaction at a time, and what it keeps."""
