"""What a trained network offers: evaluate, predict, prune."""
