"""environment.tune: settings chosen by measurements."""
