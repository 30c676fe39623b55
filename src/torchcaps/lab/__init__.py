"""A laboratory on top of the library: measurements, the paper's experiments, and their results as files."""
