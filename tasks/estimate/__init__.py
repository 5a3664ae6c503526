"""What a run takes, before anything starts: parameters, arithmetic, memory."""
