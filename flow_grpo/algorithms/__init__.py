"""One file per algorithm, composed of the pure core."""
