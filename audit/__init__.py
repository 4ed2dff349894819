"""The losslessness audit: does a bundle emit what its target alone would?"""
