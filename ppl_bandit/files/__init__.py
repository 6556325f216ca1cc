"""Files of users: the experiments that a service serves, and its keys."""
