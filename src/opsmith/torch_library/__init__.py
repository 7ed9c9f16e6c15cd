"""Operators as torch knows them: registration with the dispatcher, and what its keys do."""
