"""Adapters for trainers; each imports the facade only."""
