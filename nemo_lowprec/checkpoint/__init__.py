"""The saved form: what is written is there in full or not at all, and what is read is what was written."""
