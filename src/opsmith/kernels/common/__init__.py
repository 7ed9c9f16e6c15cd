"""Code that all kernel languages share."""
