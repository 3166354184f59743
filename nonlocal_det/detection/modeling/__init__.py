"""Heads with non-local blocks."""
