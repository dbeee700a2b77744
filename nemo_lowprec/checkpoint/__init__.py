"""The saved form: files and folders that are complete or absent, and whose checksums are compared on load."""
