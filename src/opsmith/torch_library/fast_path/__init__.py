"""Calls that bypass the dispatcher where it has nothing to do."""
