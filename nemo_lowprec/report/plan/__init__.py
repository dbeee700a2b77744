"""The plan: memory and traffic of a training before it is started."""
