"""Known calls: their signatures, and the routes that they take."""
