"""Replay of logged rollouts: census, arms, gradients, predictions. `fastadv replay --help` is the way in."""
