"""What benchmarks of involution share: ways to compute it, times in turns, the machine's ceilings, memory."""
