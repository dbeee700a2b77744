"""Pages: what a run has recorded, as one HTML file that needs no network."""
