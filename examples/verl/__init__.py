"""verl with fastadv: a training step of verl's own parts on a CPU."""
