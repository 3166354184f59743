"""Pictures and videos: reading, writing, orientation, limits."""
