"""What a sync costs, estimated from rates: pure functions, and a short measurement of the rates."""
