"""The draft-verify loop, and text in and out."""
