"""The means that use torch's private names; no other folder of the package does. Each module tests itself."""
