"""What low precision does to a model while the model trains: statistics of layers, parameters and messages."""
