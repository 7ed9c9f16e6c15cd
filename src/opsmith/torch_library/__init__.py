"""Registration of operators with torch's dispatcher, and the kernel of each dispatch key."""
