"""Measurements. Nothing here is part of the package, and nothing that is timed is asserted in a test."""
