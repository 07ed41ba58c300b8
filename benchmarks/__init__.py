"""Measurements against peers: ratios of medians, each peer in jobs of its own, in turn."""
