"""Moving versions to engines."""
