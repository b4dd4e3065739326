"""Capacity planning without hardware."""
