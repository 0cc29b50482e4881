"""Programs of the tests that are no tests."""
