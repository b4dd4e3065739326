"""Deployments by name."""
