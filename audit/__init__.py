"""The losslessness audit, which checks that a bundle emits what its target alone would."""
