"""Runs of several levels side by side: what a level loses, and what it gains."""
