"""Configs: keys with their comments, loading files and overrides, and the words of messages."""
