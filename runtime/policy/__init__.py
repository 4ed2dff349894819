"""What decides on the drafter and on k."""
