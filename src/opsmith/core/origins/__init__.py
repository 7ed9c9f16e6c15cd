"""Origins of operators: where the code of an operator comes from, and the parts that it already had."""
