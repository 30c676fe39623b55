"""A local page on which people see and touch what is inside a trained network. Needs the extra [serve]."""
