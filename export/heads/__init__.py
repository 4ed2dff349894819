"""Read draft heads and the output heads of drafts."""
