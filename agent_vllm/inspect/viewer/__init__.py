"""Look at recorded rollouts in a browser."""
