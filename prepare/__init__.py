"""From the name of a model to a bundle in the user's cache."""
