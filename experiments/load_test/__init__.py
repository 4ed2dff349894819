"""A load test: a server, good clients, hostile clients, and the report."""
