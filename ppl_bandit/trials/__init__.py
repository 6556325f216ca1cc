"""Planning an experiment: designs, stopping rules, operating characteristics, calibration."""
