"""What happens after a step, beside the step itself."""
