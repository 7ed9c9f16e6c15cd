"""Known calls: their signatures and their routes."""
