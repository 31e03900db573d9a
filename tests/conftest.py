"""Shared by the tests."""
