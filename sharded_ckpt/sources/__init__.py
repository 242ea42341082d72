"""Training objects as named slices, and back: one module for each kind of object."""
