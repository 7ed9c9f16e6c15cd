"""Properties of an operator under torch's transforms, tracing, compiling and exporting."""
