"""What every lowering and backend must do, as functions and data: usable with and without a test runner."""
