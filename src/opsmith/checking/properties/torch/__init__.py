"""Properties that ask how torch's transforms, tracing, compiling and exporting treat an operator."""
