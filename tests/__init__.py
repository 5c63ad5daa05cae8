"""Tests, beside the idea that they prove."""
