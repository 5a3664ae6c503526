"""The plan of a run: settings from the machine's facts and the configuration, and which of them later attempts keep."""
