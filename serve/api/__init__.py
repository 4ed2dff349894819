"""The HTTP API: what requests may say, and how answers are written."""
