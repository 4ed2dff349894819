"""The file format: `manifest.json` and sealed folders."""
