"""Programs behind figures of the documentation. They are not part of the package that is installed."""
