"""Properties of behaviour: layouts, side effects, state, randomness, memory and copies."""
