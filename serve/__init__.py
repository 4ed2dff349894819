"""An OpenAI-compatible HTTP server over a bundle."""
