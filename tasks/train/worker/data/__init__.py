"""Which rows of the dataset a rank sees at a step."""
