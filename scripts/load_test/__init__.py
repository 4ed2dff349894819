"""What `scripts/soak` runs: a server, good clients, hostile clients, and the report."""
