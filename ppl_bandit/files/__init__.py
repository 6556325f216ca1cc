"""Files of users: programs, the experiments that a service serves, and its keys."""
