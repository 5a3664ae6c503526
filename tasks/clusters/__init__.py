"""Training on several machines: how their agents meet, prove that they are the same, and end together."""
