"""What an answer must be, and the tokens that may follow."""
