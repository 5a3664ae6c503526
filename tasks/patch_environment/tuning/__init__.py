"""Settings found by measuring them on this machine, for a small part of the run's time."""
