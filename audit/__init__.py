"""The losslessness audit: checks that a bundle emits what its target alone would."""
