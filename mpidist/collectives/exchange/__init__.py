"""What is moved and not reduced, or reduced into shares; sends and receives; Python objects."""
