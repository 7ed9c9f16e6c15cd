"""From the source of a kernel to something that runs: compilers, and a cache of what they made."""
