"""Mixed precision: loss scaler and autocast."""
