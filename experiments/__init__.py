"""Programs that measured the figures in the documentation. They are not part of the installed package."""
