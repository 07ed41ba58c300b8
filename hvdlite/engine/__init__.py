"""The control plane: what is reduced, when, and in which order."""
