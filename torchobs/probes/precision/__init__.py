"""Loss scaler and autocast."""
