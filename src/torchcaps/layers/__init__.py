"""The parts of a capsule network that hold weights."""
