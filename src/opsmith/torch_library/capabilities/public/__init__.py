"""What is used where a capability is off: the same functions, by torch's public names alone."""
