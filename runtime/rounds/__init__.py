"""One round on the device, and what it reads and writes."""
